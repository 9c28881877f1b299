"""Publishes a network on the Hugging Face Hub: weights, config.json and a model card, in one commit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from zoo.config.architectures import HUB_PREFIX
from zoo.config.network import ExternalSpec
from zoo.config.published import Published, published
from zoo.config.record import NetworkRecord
from zoo.errors import ConfigError, WeightsError, escape, join_names
from zoo.registry.load_network import LoadedNetwork, as_loaded
from zoo.registry.preprocessing import describe_images
from zoo.tables import markdown_list, markdown_page, markdown_table
from zoo.tasks import task_of
from zoo.weights._hub import CONFIG, WEIGHTS, check_hub_installed, is_repository, reason_of
from zoo.weights._safetensors_files import check_installed, safetensors_bytes

CARD = "README.md"
# Keys of timm's description of its own networks, besides preprocessing.
OF_TIMM = ("first_conv", "classifier", "pool_size", "fixed_input_size", "min_input_size")
PIPELINES = {"classification": "image-classification", "segmentation": "image-segmentation"}


def push(
    network: LoadedNetwork | str | os.PathLike[str],
    repository: str,
    *,
    weights: str | os.PathLike[str] | None = None,
    license_id: str | None = None,
) -> str:
    """Publish a network as ``hf-hub:repository``; return the address of the commit.

    Creates the repository if it does not exist. Does not replace its model card, because the owner may have edited it.

    Args:
    - `network`: a name for `zoo.load_network`, or its result.
    - `repository`: OWNER/NAME.
    - `weights`: weights file or published name; default: the weights of ``network``.
    - `license_id`: license of the weights, by the Hub's name ("apache-2.0"). Default: as for published weights.

    Raises ConfigError for a malformed name and a missing license. Raises WeightsError for weights that are not finite,
    and if the Hub refuses.
    """
    if not is_repository(repository):
        raise ConfigError(f"{escape(repository)!r} is not the name of a repository", remedy="give OWNER/NAME")
    check_hub_installed(repository)
    check_installed()
    network = as_loaded(network, weights)
    state_dict = network.model.state_dict()
    if odd := [key for key, tensor in state_dict.items() if not tensor.isfinite().all()]:
        what = f"{len(odd)} of {len(state_dict)} tensors hold infinities or NaN: {join_names(odd)}"
        raise WeightsError(what, network.weights, "publish weights whose outputs are finite")
    digests = network.digests()
    entry = next((each for each in published().values() if each.digest.digits in digests), None)
    if license_id is None and entry is None:
        what = f"the license of {escape(network.weights)} is unknown"
        raise ConfigError(what, remedy="give it, such as --license apache-2.0")
    record = network.experiment.record(network.class_names)
    files = {
        WEIGHTS: safetensors_bytes(state_dict, record),
        CONFIG: (json.dumps(hub_config(network, record), indent=2) + "\n").encode(),
    }
    return _upload(repository, files, model_card(network, record, repository, license_id, entry))


def _upload(repository: str, files: Mapping[str, bytes], card: str) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    api = HfApi(library_name="zoo")
    try:
        api.create_repo(repository, exist_ok=True)
        if not api.file_exists(repository, CARD):
            files = {**files, CARD: card.encode()}
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
        return str(api.create_commit(repository, operations, commit_message="Upload weights with zoo push").commit_url)
    except Exception as error:  # versions of huggingface_hub use different HTTP clients
        remedy = "log in with hf auth login, or set HF_TOKEN to a token that may write to the repository"
        if constants.HF_HUB_OFFLINE:
            remedy = "unset HF_HUB_OFFLINE"
        raise WeightsError(f"the Hub did not accept the files ({reason_of(error)})", repository, remedy) from error


def hub_config(network: LoadedNetwork, record: NetworkRecord) -> dict[str, Any]:
    """Return the content of config.json: the keys of timm, and the record under "network".

    timm loads its own networks from it. Architectures of other packages have a prefix that timm does not recognize.
    """
    spec = record.spec
    is_timm = isinstance(spec, ExternalSpec) and spec.package == "timm"
    name = spec.arch if isinstance(spec, ExternalSpec) else f"zoo:{spec.arch}"
    images = {key: value for key, value in describe_images(record).items() if key not in ("scale", "crop")}
    cfg = {"num_classes": spec.num_classes, **images}
    of_timm: Mapping[str, Any] = getattr(network.model, "pretrained_cfg", {}) if is_timm else {}
    cfg |= {key: of_timm[key] for key in OF_TIMM if of_timm.get(key) is not None}
    return {
        "architecture": name.removeprefix("timm:"),
        "num_classes": spec.num_classes,
        **({"num_features": network.model.num_features} if hasattr(network.model, "num_features") else {}),
        **({"model_args": spec.options} if is_timm and spec.options else {}),
        **({"label_names": record.class_names} if record.class_names else {}),
        "pretrained_cfg": cfg,
        "network": record.content(),
    }


def model_card(
    network: LoadedNetwork,
    record: NetworkRecord,
    repository: str,
    license_id: str | None,
    entry: Published | None,
) -> str:
    """Return the model card, Markdown with the metadata that the Hub reads.

    Args:
    - `network`, `record`: the network and its description.
    - `repository`: OWNER/NAME.
    - `license_id`: license by the Hub's name; None for the license of ``entry``, in words.
    - `entry`: the published weights with the scores for the card; None for other weights.
    """
    from huggingface_hub import ModelCardData

    license_text = "" if entry is None else entry.weights.license
    own: dict[str, Any] = {"license": license_id}
    if license_id is None:  # on the Hub, names of other licenses have no spaces or capitals
        own = {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", license_text.lower())}
    pipeline = PIPELINES[network.experiment.task]
    arch = record.spec.arch
    library = "timm" if arch.startswith("timm:") else "zoo"
    data = ModelCardData(**own, library_name=library, pipeline_tag=pipeline, tags=[pipeline, "zoo"])
    usage = f'import zoo\n\nmodel = zoo.get("{HUB_PREFIX}{repository}").eval()\n'
    if network.experiment.task == "classification":
        usage += f'images = zoo.transforms("{HUB_PREFIX}{repository}")\n'
    return markdown_page(
        [
            f"---\n{data.to_yaml()}\n---",
            f"# {repository.partition('/')[2]}",
            markdown_list([f"Architecture: {arch}", f"License: {license_id or license_text}"]),
            "config.json describes the network and the preprocessing of images.",
            f"## Use\n\n```python\n{usage}```",
            "" if entry is None else _score_section(network, entry),
        ]
    )


def _score_section(network: LoadedNetwork, entry: Published) -> str:
    labels = task_of(network.experiment).shown_labels
    rows = [[protocol, *map(score.get, labels)] for protocol, score in entry.scores.items()]
    table = markdown_table(["protocol", *(f"{label} %" for label in labels.values())], rows)
    return f"## Scores\n\n{table}\n\nPublished by the authors: {entry.expected.source}."
