"""Loads any network with its weights and scores it on a folder of images: `load_network` and `score`."""

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
from zoo.engine.task import Result, ScoringProtocol, Task
from zoo.engine.validation import validate
from zoo.errors import ConfigError, WeightsError, listed, nearest, printable
from zoo.models.external import check_logits
from zoo.run.console import Progress
from zoo.run.environment import describe_environment
from zoo.spec import NetworkSpec
from zoo.tasks import task_of
from zoo.tasks.protocols import Protocol
from zoo.weights import StoredWeights, digests_of, load_stored, read_weights
from zoo.weights.cache import published_name
from zoo.weights.published import entry_of
from zoo.weights.stored_spec import check_same_network, is_described, parse_stored_experiment


@dataclass(frozen=True)
class LoadedNetwork:
    """A network with its weights, and what has to be known to score it.

    Args:
    - `title`: the name under which tables show the network.
    - `model`: the network, (N, 3, h, w) -> logits (N, classes), or (N, classes, h, w) where it segments.
    - `experiment`: the settings that the weights were trained with; the defaults for a bare architecture.
    - `weights`: the file of the weights, or the name of published ones; None if the weights come from neither.
    - `class_names`: names of the outputs in their order, made `printable`; None where they are not known.
    """

    title: str
    model: nn.Module
    experiment: Experiment
    weights: str | Path | None = None
    class_names: Sequence[str] | None = None

    @property
    def task(self) -> Task:
        """What the network is for."""
        return task_of(self.experiment)

    @property
    def own_protocol(self) -> ScoringProtocol:
        """The protocol that the experiment validates with."""
        return self.task.own_protocol

    def result_json(self, result: Result, process: Process | None = None) -> dict[str, Any]:
        """Return the contents of a result file: scores, digests of the weights, machine and versions.

        Published weights are known by their md5 alone.
        """
        md5 = sha256 = None
        if self.weights is not None:
            name = published_name(self.weights)  # the md5 of published weights was compared when they were read
            md5, sha256 = digests_of(self.weights).values() if name is None else (entry_of(name).md5, None)
        environment = describe_environment((process or _only_process()).device)
        return {**result.to_json(md5, environment), "weights_sha256": sha256}


def load_network(name: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> LoadedNetwork:
    """Return a network with weights, ready for `score`.

    If training kept a moving average of the weights, the network gets that average.

    Args:
    - `name`: an experiment file (.json), the name of a bundled experiment or published network, a weights file that
      says which network it belongs to, an architecture, or with ``weights`` a network of another package, such as
      "torchvision:resnet50", for 1000 classes.
    - `weights`: a weights file or the name of published weights. Default: those of the file ``name``, or those that are
      published under the name; an architecture stands for its only published network.

    Raises ConfigError for an unknown name. Raises WeightsError for weights that are missing, that do not fit (the
    classifier included), or that say that they belong to another network.
    """
    name = os.fspath(name)
    file = find_experiment(name)
    title = printable(name if file is None else file.stem)
    if file is not None:
        experiment = load_experiment(file)
        weights = _published(title) if weights is None else weights
        stored = read_weights(weights)
    elif os.path.isfile(name):
        stored_with_network = read_weights(name)
        experiment = _experiment_of(stored_with_network)
        weights, stored = (name, stored_with_network) if weights is None else (weights, read_weights(weights))
    elif weights is None:
        _check_known(name)
        if is_external(name):
            raise WeightsError(f"there are no published weights of {printable(name)} here; give a file, --weights FILE")
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
            f"the file has weights for the body alone, and {' and '.join(report.initial)} would be random; "
            f"{printable(stored.path)}: give those of a whole {experiment.network.arch}; zoo train --weights begins "
            "with this file"
        )
    # A file of another package's trainer does not say which of its tensors are the classifier's; all of them fit.
    if report.classifier != "loaded" and not (report.classifier == "none" and is_external(network.arch)):
        raise WeightsError(
            f"the classifier of the file does not fit the network; {printable(stored.path)}: "
            f"a random classifier is not worth a score, give the experiment that the weights were trained with"
        )
    names = _class_names(title, weights, stored, experiment)
    return LoadedNetwork(title, model, experiment, os.fspath(weights), names)


def _experiment_of(stored: StoredWeights) -> Experiment:
    """Return the experiment of a checkpoint; for another weights file, the experiment that its record describes."""
    spec = stored.checked_spec()
    if spec is None:
        raise WeightsError(
            f"the file does not say which network it belongs to; {printable(stored.path)}: name the network or its "
            "experiment, and give the file as its --weights"
        )
    return parse_stored_experiment(stored.content, printable(stored.path)) or _experiment_from(spec)


def _experiment_of_architecture(name: str, stored: StoredWeights) -> Experiment:
    """Return the experiment for weights of the architecture ``name``, with defaults for what the weights do not say."""
    if stored.spec is not None and is_described(name):
        check_same_network(stored.spec, {"arch": name}, printable(stored.path), "the command")
        return _experiment_of(stored)
    if is_external(name):
        return parse_experiment({"network": {"arch": name}}, f"the network {name}")
    with torch.device("meta"):
        spec = registry.get(name).built_as
    assert spec is not None
    stored.warn_of_assumptions(spec, given=())
    return _experiment_from(spec)


def _experiment_from(spec: NetworkSpec) -> Experiment:
    """Return the experiment of a network, with the preprocessing of its weights file."""
    images = Input() if spec.preprocessing is None else Input(**spec.preprocessing.model_dump())
    return Experiment(network=spec.for_experiment(), input=images)


def _class_names(
    title: str, weights: str | os.PathLike[str], stored: StoredWeights, experiment: Experiment
) -> Sequence[str] | None:
    """Return the names of the classes: those of the weights' record, or ImageNet's for published classifiers."""
    if stored.spec is not None and stored.spec.class_names is not None:
        return stored.spec.class_names
    is_published = title in registry.published() or published_name(weights) is not None
    return imagenet_wnids() if is_published and experiment.task == "classification" else None


def _check_known(name: str) -> None:
    """Raise ConfigError for a name that is neither a path nor that of a network or experiment."""
    known = {*registry.list_models(), *experiment_names()}
    if name not in known and not is_external(name) and os.sep not in name:
        raise ConfigError(
            f"there is no network, experiment or file called {printable(name)}; the nearest names are "
            f"{', '.join(nearest(name, sorted(known)))} (zoo list shows all networks)"
        )


def _published(title: str) -> str:
    """Return the name of an experiment's published weights, which is its own."""
    if title not in registry.published():
        raise WeightsError(
            f"there are no published weights of {title}; command line: give those to score, --weights FILE"
        )
    return title


def score(
    network: LoadedNetwork,
    data: str | os.PathLike[str],
    protocol: ScoringProtocol | str | None = None,
    *,
    process: Process | None = None,
    workers: int = 0,
    batch_size: int | None = None,
    limit: int | None = None,
    on_bad_image: OnBadImage = "stop",
    log_every: int | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
) -> Result:
    """Return the scores of a network on the images of ``data``/val, each of which is scored exactly once.

    The experiment of the network knows its task. A classification is scored by the crops of a ``protocol``, a
    segmentation by whole images, whose logits are compared with the label maps at the size of these.

    >>> import zoo
    >>> network = zoo.load_network("runs/mine/checkpoint.pth.tar")
    >>> result = zoo.score(network, "data")
    >>> print(f"{result.protocol}: {result.count} images, top-1 between 0 and 100 %: {0 <= result.top1 <= 100}")
    center10-scale12: 7 images, top-1 between 0 and 100 %: True

    Args:
    - `network`: what `load_network` returned; its model is moved to the device of ``process``.
    - `data`: the folder that holds val/ with a folder per class, or with shards, whose folder may also be given by its
      address (https://host/path, s3://bucket/path); of segmentation a folder as ``segmentation.layout`` says.
      Classes are matched to the network's outputs by name, see `match_classes`.
    - `protocol`: how images are scaled and cropped, or the published name of a way, such as "center224" or, of
      segmentation, "whole-flip"; default what the network's experiment validates with.
    - `process`: this process of a run of several, all of which get the scores of all images; default a run of one
      process, on the CUDA device where there is one.
    - `workers`: processes that read images; with 0 this process reads them itself.
    - `batch_size`: (classification) images at once per process; default the experiment's batch size (a tenth of it for
      ten crops) over the number of processes. It is halved when memory is full. A segmentation takes one image.
    - `limit`: number of images to score, spread evenly over the data; default all.
    - `on_bad_image`: "stop" raises DataError for an image that cannot be read, "skip" leaves it out and counts it.
    - `log_every`: batches between two lines of progress where no bar can be drawn; default a line in 30 seconds.
    - `record`: called with each batch of this process and its logits.

    Raises ConfigError for an unknown protocol or one that does not belong to the task, for crops that do not fit, and,
    on every process, if the processes of a run were not started with the same arguments; DataError for data that do not
    fit.
    """
    process, protocol, settings = process or _only_process(), _protocol(network, protocol), network.experiment
    task = network.task
    if is_external(settings.network.arch) and isinstance(protocol, Protocol):
        model = registry.build_on_meta(settings.network).eval()
        check_logits(model, settings.network.arch, settings.network.num_classes, protocol.crop, "the crop")
    loader = task.build_val_loader(
        parse_data_path(data),
        protocol,
        batch_size=batch_size,
        rank=process.rank,
        world_size=process.world_size,
        workers=workers,
        limit=limit,
        pin_memory=process.device.type == "cuda",
        on_bad_image=on_bad_image,
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


def _only_process() -> Process:
    """Return the process of a run that has only one."""
    return Process(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _protocol(network: LoadedNetwork, protocol: ScoringProtocol | str | None) -> ScoringProtocol:
    """Return the protocol, which may be given by its name; ConfigError for one of another task."""
    known, own = network.task.protocols, network.own_protocol
    if protocol is None or type(protocol) is type(own):
        return protocol or own
    if not isinstance(protocol, str):
        raise ConfigError(f"{protocol.name} is no protocol of {network.experiment.task}, for which {network.title} is")
    if protocol not in known:
        raise ConfigError(f"{printable(protocol)!r} is no published protocol; those are {listed(known)}")
    return known[protocol]
