"""Reads the description of the network in a weights file, and compares it with requested settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeGuard

from zoo.config.architectures import ARCHITECTURES, network_sizes
from zoo.config.experiment import Experiment
from zoo.config.network import WITH_PARAMETER, ExternalSpec, NetworkSpec, Spec, merge, spec_class
from zoo.config.parse import parse_experiment
from zoo.config.record import NetworkRecord, parse_record
from zoo.config.section import check_extent
from zoo.errors import WeightsError, join_names, nearest, shorten_repr

# Settings that do not change weights, or only those of the classifier.
FREE_SETTINGS = {
    *("num_classes", "memory", "weight_init", "weight_gain_multiplier"),
    *("dilation", "output_stride", "pooling_size", "dropout", "drop_path_rate", "grid_bits"),
}
# Settings of layers that `zoo.convert._transfer` reconciles.
TRANSFERABLE = ("norm", "activation", "activation_param")
MAX_SHOWN_NAME = 100  # characters
ASKED_BY_NETWORK = "the network that it is loaded into"
REMEDY = "take the weights alone with zoo.weights.read_state_dict(FILE), or ask who made the file"


def parse_description(
    content: Mapping[Any, Any], source: str
) -> tuple[NetworkRecord, Experiment | None] | tuple[None, None]:
    """Return the record in the content of a weights file, and its experiment if it is a checkpoint of this package.

    Both are None for files of other programs. Raises WeightsError for an invalid record, ConfigError for invalid
    settings.
    """
    network = content.get("network")
    if not isinstance(content.get("state_dict"), dict) or not _is_description(network):
        return None, None
    record = parse_network(network, source)
    if "format_version" not in content:
        return record, None
    experiment = parse_experiment(content["config"], source)
    if experiment.network.without_pretrained() != record.spec:
        raise WeightsError(f"{source}: describes two networks, one under network and one under config; {REMEDY}")
    return record, experiment


def parse_network(network: Mapping[str, Any], source: str) -> NetworkRecord:
    """Parse the value under "network" in a weights file.

    Raises WeightsError, naming ``source`` and the key, for anything that this package does not write.
    """
    check_extent({key: value for key, value in network.items() if key != "class_names"}, source, WeightsError)
    arch = str(network.get("arch"))
    section = spec_class(arch)
    # A description without these could come from another program.
    required = ("arch", "options", *(TRANSFERABLE if section is NetworkSpec else ()))
    if missing := [key for key in required if key not in network]:
        raise WeightsError(f"{source}: network: lacks {join_names(missing)}; {REMEDY}")
    if section is not ExternalSpec and isinstance(network["arch"], str) and arch not in ARCHITECTURES:
        hint = nearest(arch[:MAX_SHOWN_NAME], ARCHITECTURES, "zoo list shows all")
        raise WeightsError(
            f"{source}: network.arch = {shorten_repr(arch)}: this version has no such network; {hint}; {REMEDY}"
        )
    try:
        record = parse_record(network, source)
    except WeightsError as error:
        raise WeightsError(f"{error}; {REMEDY}") from error
    if record.spec != record.spec.without_pretrained():
        raise WeightsError(f"{source}: network.options: pretrained asks for other weights than the file's; {REMEDY}")
    return record


def _is_description(network: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether the value under "network" is a spec, valid or not, and not another trainer's settings."""
    return isinstance(network, dict) and not network.keys().isdisjoint(NetworkSpec.model_fields)


def check_same_network(
    spec: Spec,
    wanted: Mapping[str, Any],
    where: str | os.PathLike[str],
    asked_by: str = "the arguments",
    *,
    is_body: bool = False,
    may_transfer: bool = False,
) -> None:
    """Raise WeightsError if the settings ``wanted`` contradict the spec of a file.

    Keys that are not in ``wanted`` are not compared. These may differ: `FREE_SETTINGS`, "inplace" and "sync", and with
    ``may_transfer`` also `TRANSFERABLE`. For external networks only the architecture is compared, since it is unknown
    which arguments of their builders change weights.

    Args:
    - `spec`: the network of the file.
    - `wanted`: the requested settings, with the keys of `NetworkSpec`.
    - `where`: the file, in the message.
    - `asked_by`: the origin of ``wanted``, in the message.
    - `is_body`: whether ``wanted`` is a DeepLab whose body gets the weights.
    - `may_transfer`: whether `zoo.convert._transfer` will reconcile norms and activation.
    """
    wanted = _flat(_settings_of_body(wanted, spec) if is_body else wanted)
    arch = wanted.get("arch", spec.arch)
    if not {spec.arch, arch} <= ARCHITECTURES.keys():
        wanted = {"arch": arch}
    stored = {**default_options(spec.arch), **_flat(spec.model_dump())}
    differences = [
        (key, stored.get(key), value)
        for key, value in wanted.items()
        if key not in FREE_SETTINGS and not (may_transfer and key in TRANSFERABLE) and not _agree(stored, key, value)
    ]
    if any(key == "arch" for key, *_ in differences):  # options of different architectures cannot be compared
        differences = [difference for difference in differences if difference[0] in ("arch", "norm", "activation")]
    if not differences:
        return
    parts = [
        f"{key}={shorten_repr(recorded)} in the file, but {key}={shorten_repr(value)} is asked for by {asked_by}"
        for key, recorded, value in differences
    ]
    raise WeightsError(
        f"belongs to another network: {'; '.join(parts)}",
        where,
        "give the experiment or the arguments that the file was trained with, or convert the file (zoo convert); in "
        "Python, model.load_state_dict(zoo.weights.read_state_dict(FILE)) loads it all the same",
    )


def settings_of_network(spec: Spec) -> dict[str, Any]:
    """Return the settings of a built network, with all options of its architecture."""
    return merge(default_options(spec.arch), spec.model_dump())


def default_options(arch: str) -> dict[str, Any]:
    """Return all options of an architecture; none for networks of other packages, because defaults are unknown."""
    return ARCHITECTURES[arch].options().model_dump() if arch in ARCHITECTURES else {}


def complete_settings(
    file: Spec,
    wanted: Mapping[str, Any],
    where: str | os.PathLike[str],
    *,
    is_body: bool = False,
    may_transfer: bool = True,
) -> dict[str, Any]:
    """Complete the settings ``wanted`` of a network with the settings that a weights file describes.

    Args:
    - `file`: the network of the file.
    - `wanted`, `where`, `may_transfer`: see `check_same_network`.
    - `is_body`: whether the file is for the body of a segmentation network. The network then gets its norm and stem.

    Raises WeightsError if ``wanted`` contradicts the file.
    """
    check_same_network(file, wanted, where, is_body=is_body, may_transfer=may_transfer)
    if not is_body:
        return merge(file.model_dump(), wanted)
    chooses_layers = spec_class(wanted["arch"]) is NetworkSpec
    norms = {key: getattr(file, key) for key in TRANSFERABLE} if chooses_layers else {}
    stem = {key: value for key, value in file.options.items() if key == "input_3x3"}
    return merge(norms, stem, wanted)


def _settings_of_body(settings: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """Return the settings of a segmentation network's body, for comparison with the spec of a file for the body.

    Uses the name of the file's architecture if that architecture has the same tensors as the body.
    """
    body = ARCHITECTURES[settings["arch"]].structure["body"]
    fits = spec.arch in ARCHITECTURES and has_same_tensors(spec.arch, body)
    known = ARCHITECTURES[body].options.model_fields
    options = {key: value for key, value in settings["options"].items() if key in known}
    common = {key: settings[key] for key in TRANSFERABLE if key in settings}
    return {**common, "arch": spec.arch if fits else body, "options": options}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings: options become keys beside the other settings."""
    return {**{key: value for key, value in settings.items() if key != "options"}, **settings.get("options", {})}


def _agree(stored: Mapping[str, Any], key: str, value: Any) -> bool:
    if key == "norm":
        return (value == "standard") == (stored["norm"] == "standard")
    if key == "activation_param" and stored["activation"] not in WITH_PARAMETER:
        return True
    recorded, value = (list(each) if isinstance(each, tuple) else each for each in (stored.get(key), value))
    return bool(recorded == value)


def has_same_tensors(first: str, second: str) -> bool:
    """Return whether two networks have the same state-dict keys and shapes, up to the number of classes.

    A WiderResNet and its A2 variant differ only in pooling and dropout, which have no tensors.
    """
    hashes = [network_sizes().get(name, {}).get("keys_sha256", name) for name in (first, second)]
    return hashes[0] == hashes[1]
