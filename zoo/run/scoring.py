"""Loads a network with its weights and scores it on a folder of images: `load_network` and `score`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo import registry
from zoo.architectures import is_external
from zoo.config import Experiment, Input, experiment_names, find_experiment, load_experiment, parse_experiment
from zoo.data.classes import match_classes
from zoo.data.folder import Batch, OnBadImage
from zoo.data.imagenet import imagenet_wnids
from zoo.data.location import parse_data_path
from zoo.engine.consistency import check_same_on_all_ranks, dataset_fingerprint, environment_fingerprint, weights_digest
from zoo.engine.process import Process
from zoo.engine.task import EvalProtocol, Result, Task
from zoo.engine.validation import validate
from zoo.errors import ConfigError, WeightsError, escape, join_names, nearest
from zoo.models.build import build_on_meta
from zoo.models.external import check_logits, own_preprocessing
from zoo.run.console import Progress
from zoo.run.environment import describe_environment
from zoo.spec import NetworkSpec
from zoo.tasks import task_of
from zoo.tasks.protocols import CropProtocol
from zoo.weights import StoredWeights, digests_of, load_stored, read_weights
from zoo.weights.cache import published_name
from zoo.weights.published import entry_of
from zoo.weights.stored import is_stored
from zoo.weights.stored_spec import check_same_network, is_described, parse_stored_experiment


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

    @property
    def own_protocol(self) -> EvalProtocol:
        """The protocol of the experiment's own validation."""
        return self.task.own_protocol

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

    Raises ConfigError for an unknown name, and WeightsError for weights that are missing, that do not fit (including
    the classifier), or that belong to another network.
    """
    name = os.fspath(name)
    file = find_experiment(name)
    title = escape(name if file is None else file.stem)
    if file is not None:
        experiment = load_experiment(file)
        weights = _published(title) if weights is None else weights
        stored = read_weights(weights)
    elif is_stored(name):
        stored_with_network = read_weights(name)
        experiment = _experiment_of(stored_with_network)
        weights, stored = (name, stored_with_network) if weights is None else (weights, read_weights(weights))
    elif weights is None:
        _check_known(name)
        if is_external(name):
            what = f"there are no published weights of {escape(name)}"
            raise WeightsError(what, remedy="give a file, --weights FILE")
        return replace(load_network(registry.only_variant(name)), title=title)
    else:
        _check_known(name)
        stored = read_weights(weights)
        experiment = _experiment_of_architecture(name, stored)
    network = experiment.network.without_pretrained()
    model = registry.build_from_config(network)
    report = load_stored(model, stored, "the checkpoint" if file is None else "the experiment")
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
    names = _class_names(title, weights, stored, experiment)
    return LoadedNetwork(title, model, experiment, published_name(weights) or os.fspath(stored.path), names)


def _experiment_of(stored: StoredWeights) -> Experiment:
    """Return the experiment of a checkpoint, or an experiment with the network that another weights file describes."""
    spec = stored.checked_spec()
    if spec is None:
        raise WeightsError(
            "the file does not describe its network",
            stored.path,
            "name the network or its experiment, and give the file as --weights",
        )
    return parse_stored_experiment(stored.content, escape(stored.path)) or _experiment_from(spec)


def _experiment_of_architecture(name: str, stored: StoredWeights) -> Experiment:
    """Return the experiment for weights of the architecture ``name``, with defaults for unknown settings."""
    if stored.spec is not None and is_described(name):
        check_same_network(stored.spec, {"arch": name}, escape(stored.path), "the command")
        return _experiment_of(stored)
    if is_external(name):
        images = own_preprocessing(name, digests_of(stored.path)["sha256"]).model_dump()
        return parse_experiment({"network": {"arch": name}, "input": images}, f"the network {name}")
    with torch.device("meta"):
        spec = registry.get(name).built_as
    assert spec is not None
    stored.warn_of_assumptions(spec, given=())
    return _experiment_from(spec)


def _experiment_from(spec: NetworkSpec) -> Experiment:
    """Return the experiment of a network with the preprocessing of its weights file."""
    images = Input() if spec.preprocessing is None else Input(**spec.preprocessing.model_dump())
    return Experiment(network=spec.for_experiment(), input=images)


def _class_names(
    title: str, weights: str | os.PathLike[str], stored: StoredWeights, experiment: Experiment
) -> Sequence[str] | None:
    """Return the class names in the weights file, or ImageNet's for published classifiers."""
    if stored.spec is not None and stored.spec.class_names is not None:
        return stored.spec.class_names
    is_published = title in registry.published() or published_name(weights) is not None
    return imagenet_wnids() if is_published and experiment.task == "classification" else None


def _check_known(name: str) -> None:
    """Raise ConfigError for a name that is neither a path nor a network nor an experiment."""
    known = {*registry.list_models(), *experiment_names()}
    if name not in known and not is_external(name) and os.sep not in name:
        raise ConfigError(
            f"there is no network, experiment or file called {escape(name)}",
            remedy=f"the nearest names are {', '.join(nearest(name, sorted(known)))} (zoo list shows all networks)",
        )


def _published(title: str) -> str:
    """Return the name of an experiment's published weights, which equals the name of the experiment."""
    if title not in registry.published():
        raise WeightsError(
            f"there are no published weights of {title}", "command line", "give the weights to score, --weights FILE"
        )
    return title


def score(
    network: LoadedNetwork,
    data: str | os.PathLike[str],
    protocol: EvalProtocol | str | None = None,
    *,
    process: Process | None = None,
    workers: int = 0,
    batch_size: int | None = None,
    limit: int | None = None,
    on_bad_image: OnBadImage = "stop",
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
      segmentation a folder as ``segmentation.layout`` says. Classes are matched to the network's outputs by name, see
      `match_classes`.
    - `protocol`: evaluation protocol, or the name of a published one, such as "center224" or, for segmentation,
      "whole-flip"; default: that of the network's experiment.
    - `process`: this process of a distributed run, in which all processes get the same result; default: a single
      process, on a CUDA device if available.
    - `workers`: worker processes that read images; with 0 this process reads them itself.
    - `batch_size`: images per batch and process, for classification; default: the experiment's batch size (a tenth of
      it for ten crops) divided by the number of processes. Halved if it does not fit into memory. Segmentation scores
      one image at a time.
    - `limit`: number of images to score, spread evenly over the data; default: all.
    - `on_bad_image`: "stop" raises DataError for an unreadable image, "skip" skips and counts it.
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
        parse_data_path(data),
        protocol,
        process.loader_options(workers, on_bad_image),
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
            "--on-bad-image": on_bad_image,
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
            num_images=loader.batch_sampler.num_images,
            protocol=protocol,
            amp=settings.training.amp,
            advance=progress.advance,
            record=record,
        )
    return replace(result, val=dataset_fingerprint(loader.dataset, len(loader.dataset)))  # type: ignore[type-var]


def single_process() -> Process:
    """Return the process of a run that is not distributed, with a CUDA device if available."""
    return Process(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _resolve_protocol(network: LoadedNetwork, protocol: EvalProtocol | str | None) -> EvalProtocol:
    """Return the protocol for an optional protocol or name. Raises ConfigError for one of another task."""
    known, own = network.task.protocols, network.own_protocol
    if protocol is None or type(protocol) is type(own):
        return protocol or own
    if not isinstance(protocol, str):
        raise ConfigError(f"protocol {protocol.name} is not for {network.experiment.task}, the task of {network.title}")
    if protocol not in known:
        what = f"{escape(protocol)!r} is not a published protocol"
        raise ConfigError(what, remedy=f"those are {join_names(known)}")
    return known[protocol]
