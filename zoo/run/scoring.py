"""Loads a network with its weights and scores it on a folder of images: `load_network` and `score`.

Tested by tests/cli/test_validate.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import registry
from zoo.config import Experiment, Input
from zoo.config.published import entry_of, published
from zoo.convert.transfer import load_transferred
from zoo.data.classes import match_classes
from zoo.data.folder import Batch
from zoo.data.imagenet import imagenet_wnids
from zoo.data.location import DataName, parse_data_path
from zoo.data.named import open_data
from zoo.engine.consistency import check_same_on_all_ranks, dataset_fingerprint, environment_fingerprint, weights_digest
from zoo.engine.process import Process
from zoo.engine.task import EvalProtocol, Result, Task
from zoo.engine.validation import validate
from zoo.errors import ConfigError, WeightsError, escape, join_names
from zoo.models.build import build_on_meta
from zoo.models.external import check_logits, own_preprocessing
from zoo.names import INPUTS, Resolved, only_variant, resolve
from zoo.run.console import Progress
from zoo.run.environment import describe_environment
from zoo.run.label_images import names_of
from zoo.run.results_table import class_table, results_table
from zoo.spec.architectures import architecture, is_external
from zoo.tasks import task_of
from zoo.tasks.protocols import CropProtocol
from zoo.tasks.segmentation import SegmentationResult
from zoo.weights import StoredWeights, digests_of
from zoo.weights.cache import published_name


@dataclass(frozen=True)
class LoadedNetwork:
    """A network with its weights and the settings to score it.

    Args:
    - `title`: name of the network in tables.
    - `model`: the network, (N, 3, h, w) -> logits (N, classes), or (N, classes, h, w) for segmentation.
    - `experiment`: settings that the weights were trained with; defaults for a bare architecture.
    - `weights`: file or published name of the weights; None for weights of another package.
    - `class_names`: names of the outputs in order, escaped by `escape`; None if unknown.
    """

    title: str
    model: nn.Module
    experiment: Experiment
    weights: str | Path | None = None
    class_names: Sequence[str] | None = None

    @property
    def task(self) -> Task:
        """The task of the experiment."""
        return task_of(self.experiment)

    def result_json(self, result: Result, process: Process | None = None) -> dict[str, Any]:
        """Return the content of a result file: scores, digests of the weights, environment."""
        md5, sha256 = self.digests()
        environment = describe_environment((process or single_process()).device)
        return {**result.to_json(md5, environment), "weights_sha256": sha256}

    def digests(self) -> tuple[str | None, str | None]:
        """Return md5 and sha256 of the weights file; of published weights the md5 alone, None for unknown ones."""
        if self.weights is None:
            return None, None
        name = published_name(self.weights)  # reading published weights verifies their md5
        if name is not None:
            return entry_of(name).md5, None
        digests = digests_of(self.weights)
        return digests["md5"], digests["sha256"]


def load_network(name: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> LoadedNetwork:
    """Return a network with weights, ready for `score`.

    If training kept a moving average of the weights, the network gets that average.

    Args:
    - `name`: an experiment file (.json), the name of a bundled experiment or published network, a weights file that
      describes its network, "hf-hub:OWNER/NAME", an architecture, or with ``weights`` a network of another package with
      1000 classes, such as "torchvision:resnet50".
    - `weights`: a weights file, the name of published weights, or "hf-hub:OWNER/NAME". Default: the weights in the file
      ``name``, or those published under the name; an architecture stands for its only published network.

    The weights are converted to the norms of the network if that is exact, and used with its activation. The log says
    so. Raises ConfigError for an unknown name, and WeightsError for weights that are missing, that do not fit
    (including the classifier), or that belong to another network.
    """
    found = resolve(name, weights)
    if found.stored is None:
        found = found.with_weights(_published(found))
    stored, experiment = found.stored, _experiment_of(found)
    assert stored is not None
    network = experiment.network.without_pretrained()
    model = registry.build_from_config(network)
    report = load_transferred(model, stored, "the experiment" if found.is_experiment else "the checkpoint")
    if found.experiment is None and found.spec is not None:
        stored.warn_of_assumptions(found.spec, given=())
    if report.initial:
        raise WeightsError(
            f"the file has weights for the body only, and {' and '.join(report.initial)} would be random",
            stored.path,
            f"give weights of a whole {experiment.network.arch}; zoo train --weights can start from this file",
        )
    # Files of other packages do not specify which tensors belong to the classifier; all of them fit.
    if report.classifier != "loaded" and not (report.classifier == "none" and is_external(network.arch)):
        raise WeightsError(
            "the classifier of the file does not fit the network",
            stored.path,
            "give the experiment that the weights were trained with",
        )
    weights = stored.published or os.fspath(stored.path)
    return LoadedNetwork(escape(found.name), model, experiment, weights, _class_names(stored, experiment))


def _published(found: Resolved) -> str:
    """Return the name of the published weights of a network that was named without weights."""
    if found.experiment is None and not found.network.is_external:
        return only_variant(found.name)
    if found.name not in published():
        raise WeightsError(
            f"there are no published weights of {escape(found.name)}", remedy="give weights to score, --weights FILE"
        )
    return found.name


def _experiment_of(found: Resolved) -> Experiment:
    """Return the settings that a network is scored with; defaults where neither name nor file has them."""
    if found.experiment is not None:
        return found.experiment
    spec, stored = found.network, found.stored
    assert stored is not None
    images = spec.preprocessing
    if images is None and spec.is_external:
        images = own_preprocessing(spec.arch, digests_of(stored.path)["sha256"])
    elif images is None:
        images = INPUTS[architecture(spec.arch).input].preprocessing()
    return Experiment(network=spec.for_experiment(), input=Input(**images.model_dump()))


def _class_names(stored: StoredWeights, experiment: Experiment) -> Sequence[str] | None:
    """Return the class names in the weights file, or ImageNet's for published classifiers."""
    if stored.spec is not None and stored.spec.class_names is not None:
        return stored.spec.class_names
    return imagenet_wnids() if stored.published and experiment.task == "classification" else None


def score(
    network: LoadedNetwork,
    data: str | os.PathLike[str] | DataName,
    protocol: EvalProtocol | str | None = None,
    *,
    process: Process | None = None,
    workers: int = 0,
    batch_size: int | None = None,
    limit: int | None = None,
    log_every: int | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
    split: str = "val",
) -> Result:
    """Return the scores of a network on the images of ``data``/val, each scored exactly once.

    The network's experiment determines the task. Classification is scored on crops as the ``protocol`` says,
    segmentation on whole images, with logits resized to the label maps.

    >>> import zoo
    >>> network = zoo.load_network("runs/mine/checkpoint.pth.tar")
    >>> result = zoo.score(network, "data")
    >>> print(f"{result.protocol}: {result.count} images, top-1 between 0 and 100 %: {0 <= result.top1 <= 100}")
    center10-scale12: 7 images, top-1 between 0 and 100 %: True

    Args:
    - `network`: result of `load_network`; its model is moved to the device of ``process``.
    - `data`: folder with val/ with a folder per class or shards, also by URL (https://host/path, s3://bucket/path); for
      segmentation a folder as ``segmentation.layout`` says; or the name of a data set, torchvision:NAME or hf:NAME.
      Classes are matched to the network's outputs by name, see `match_classes`.
    - `protocol`: evaluation protocol, or the name of a published one, such as "center224" or, for segmentation,
      "whole-flip"; default: the protocol of the network's experiment.
    - `process`: this process of a distributed run, in which all processes get the same result; default: a single
      process, on a CUDA device if available.
    - `workers`: worker processes that read images; with 0 this process reads them itself.
    - `batch_size`: images per batch and process, for classification; default: the experiment's batch size (a tenth of
      it for ten crops) divided by the number of processes. Segmentation scores one image at a
      time.
    - `limit`: number of images to score, spread evenly over the data; default: all.
    - `log_every`: batches between two progress lines, if no bar is drawn; default: a line every 30 seconds.
    - `record`: called with each batch of this process and its logits.
    - `split`: the folder in ``data``, for classification.

    Raises ConfigError for an unknown protocol, one of another task, crops that do not fit the network, and, on every
    process, if processes have different arguments; DataError for unsuitable data.
    """
    process, protocol, settings = process or single_process(), _resolve_protocol(network, protocol), network.experiment
    task = network.task
    if is_external(settings.network.arch) and isinstance(protocol, CropProtocol):
        model = build_on_meta(settings.network).eval()
        check_logits(model, settings.network.arch, settings.network.num_classes, protocol.crop, "the crop")
    loader = task.build_val_loader(
        open_data(parse_data_path(data)),
        protocol,
        process.loader_options(workers),
        batch_size=batch_size,
        limit=limit,
        split=split,
    )
    match_classes(loader.dataset, settings.network.num_classes, network.class_names)
    check_same_on_all_ranks(
        process,
        lambda: {
            **environment_fingerprint(process, "validate"),
            "protocol": protocol.name,
            "training.amp": settings.training.amp,
            "weights": weights_digest(network.model),
            "val": dataset_fingerprint(loader.dataset, loader.batch_sampler.num_images),
        },
        "give every process the same command, weights and images",
    )
    with Progress(protocol.name, len(loader), show=process.is_main, every=log_every) as progress:
        result = validate(
            network.model.to(process.device),
            task,
            loader,
            process.device,
            process.world_size,
            protocol=protocol,
            amp=settings.training.amp,
            advance=progress.advance,
            record=record,
        )
    return replace(result, val=dataset_fingerprint(loader.dataset, len(loader.dataset)))  # type: ignore[type-var]


@dataclass(frozen=True)
class Scores:
    """The scores of a network: a Markdown table, and the content of a result file."""

    table: str
    content: Mapping[str, Any]


def score_data(
    network: LoadedNetwork,
    data: str | os.PathLike[str] | DataName,
    protocol: EvalProtocol | str | None = None,
    *,
    process: Process,
    **options: Any,
) -> Scores:
    """Return table and result file of `score`, for a segmentation with a table of the classes."""
    result = score(network, data, protocol, process=process, **options)
    table = results_table(network.title, network.task.shown_labels, [result], network.experiment.expected)
    content = network.result_json(result, process)
    if isinstance(result, SegmentationResult):
        names = names_of(network.experiment, network.class_names)
        table, content = f"{table}\n\n{class_table(result, names)}", {**content, "classes": names}
    return Scores(table, content)


def single_process() -> Process:
    """Return the process of a run that is not distributed, with a CUDA device if available."""
    return Process(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _resolve_protocol(network: LoadedNetwork, protocol: EvalProtocol | str | None) -> EvalProtocol:
    """Return the protocol for an optional protocol or name. Raises ConfigError for one of another task."""
    known, own = network.task.protocols, network.task.own_protocol
    if protocol is None or type(protocol) is type(own):
        return protocol or own
    if not isinstance(protocol, str):
        raise ConfigError(f"protocol {protocol.name} is not for {network.experiment.task}, the task of {network.title}")
    if protocol not in known:
        what = f"{escape(protocol)!r} is not a published protocol"
        raise ConfigError(what, remedy=f"those are {join_names(known)}")
    return known[protocol]
