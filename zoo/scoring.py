"""Scoring a named network with its weights, as several commands do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo import registry
from zoo.architectures import ARCHITECTURES
from zoo.config import Experiment, experiment_names, find_experiment, load_experiment, parse_experiment
from zoo.data.classes import imagenet_wnids
from zoo.data.folder import Batch, OnBadImage
from zoo.data.loader import NUM_CROPS, build_val_loader
from zoo.data.matching import match_classes
from zoo.engine.agreement import check_agreement, image_facts, program_facts, weights_digest
from zoo.engine.process import Process
from zoo.engine.protocols import Protocol
from zoo.engine.validate import Result, validate
from zoo.errors import ConfigError, WeightsError, nearest, printable
from zoo.report.console import Progress
from zoo.report.environment import describe_environment
from zoo.weights import NetworkRecord, StoredWeights, load_stored, md5_of, read_weights
from zoo.weights.cache import published_name
from zoo.weights.record import check_record, experiment_in


@dataclass(frozen=True)
class Subject:
    """A network with weights, its experiment (all defaults for a bare architecture), the file of the weights.

    ``class_names``: of the outputs in their order, made `printable`; None where they are not known.
    """

    title: str
    model: nn.Module
    experiment: Experiment
    weights: Path | None
    class_names: Sequence[str] | None = None

    @property
    def own_protocol(self) -> Protocol:
        """The centre crop that the experiment validates with."""
        return Protocol(self.experiment.input.scale_val, self.experiment.input.crop_val, ten_crops=False)

    def result_json(self, result: Result, process: Process) -> dict[str, Any]:
        """Return the contents of a result file."""
        published = registry.published().get(self.title)
        md5 = (published.md5 if published else None) if self.weights is None else md5_of(self.weights)
        return result.to_json(md5, describe_environment(process.device))


def load_subject(name: str, weights: Path | None = None) -> Subject:
    """Return the network ``name`` with the weights of a file or a published name, by default its own published ones.

    ``name``: an experiment file (.json), the name of one of the experiments, a weights file that says which network it
    belongs to (whose own weights are the default), or an architecture, of which ``weights`` may say the rest. Raises
    ConfigError for an unknown name. Raises WeightsError for weights that are missing, that do not fit (the classifier
    included), or that say that they belong to another network.
    """
    path, file = Path(name), find_experiment(name)
    stored = None if weights is None else read_weights(weights)
    title = printable(name if file is None else file.stem)
    if file is not None:
        experiment = load_experiment(file)
        if stored is None:
            return Subject(title, _published(title), experiment, None, imagenet_wnids())
        model: nn.Module = registry.build_from_config(experiment.network)
    elif path.is_file():
        own = read_weights(path)
        stored = stored or own
        experiment = _experiment_of(own)
        model = registry.build_from_config(experiment.network)
    elif stored is not None and stored.record is not None and name in ARCHITECTURES:
        check_record(stored.record, {"arch": name}, printable(stored.path), "the command")
        experiment = _experiment_of(stored)
        model = registry.build_from_config(experiment.network)
    else:  # an architecture of which no file says more, or a name that there is not
        _check_known(name)
        network = registry.get(name, pretrained=stored is None)
        model, experiment = network, _experiment_from(network.built_as)
        if stored is None:
            return Subject(title, model, experiment, None, imagenet_wnids())
        if name in ARCHITECTURES:  # published networks say theirs
            stored.warn_of_assumptions(name, {"norm": network.built_as.norm, "activation": network.built_as.activation})
    _load(model, stored, "the checkpoint" if file is None else "the experiment")
    return Subject(title, model, experiment, stored.path, _class_names(title, weights, stored))


def _experiment_of(stored: StoredWeights) -> Experiment:
    """Return the experiment of a checkpoint, or what the record of another file says of one."""
    record = stored.record_to_build()
    if record is None:
        raise WeightsError(
            f"the file does not say which network it belongs to; {printable(stored.path)}: name the network or its "
            "experiment, and give the file as its --weights"
        )
    return experiment_in(stored.content, printable(stored.path)) or _experiment_from(record)


def _experiment_from(record: NetworkRecord) -> Experiment:
    return parse_experiment(record.experiment_settings(), f"the network {record.arch}")


def _class_names(title: str, weights: Path | None, stored: StoredWeights) -> Sequence[str] | None:
    """Return the names of the classes that weights know: their record's, or ImageNet's where they are published."""
    if stored.record is not None and stored.record.class_names is not None:
        return stored.record.class_names
    of_imagenet = title in registry.published() or (weights is not None and published_name(weights) is not None)
    return imagenet_wnids() if of_imagenet else None


def _check_known(name: str) -> None:
    """Raise ConfigError for a name that is neither a path nor that of a network or experiment."""
    known = {*registry.list_models(), *experiment_names()}
    if name not in known and os.sep not in name:
        raise ConfigError(
            f"there is no network, experiment or file called {printable(name)}; the nearest names are "
            f"{', '.join(nearest(name, sorted(known)))} (zoo list shows all networks)"
        )


def _published(title: str) -> nn.Module:
    if title not in registry.published():
        raise WeightsError(
            f"there are no published weights of {title}; command line: give those to score, --weights FILE"
        )
    return registry.get(title, pretrained=True)


def _load(model: nn.Module, stored: StoredWeights, asked_by: str) -> None:
    """Load a file strictly; of a run with a moving average this is that average, which its validations scored."""
    report = load_stored(model, stored, asked_by)
    if report.classifier != "loaded":
        raise WeightsError(
            f"the classifier of the file does not fit the network; {printable(stored.path)}: "
            f"a random classifier is not worth a score, give the experiment that the weights were trained with"
        )


def score(
    subject: Subject,
    protocol: Protocol,
    process: Process,
    data: Path,
    *,
    workers: int,
    batch_size: int | None = None,
    limit: int | None = None,
    on_bad_image: OnBadImage = "stop",
    print_freq: int | None = None,
    record: Callable[[Batch, Tensor], object] | None = None,
) -> Result:
    """Return the scores on the images of ``data``/val that all processes have together.

    ``batch_size``: images at once per process; default the experiment's batch size (a tenth of it for ten
    crops) over the number of processes. ``record`` is called with each batch of this process and its logits.
    Class folders are matched to the network's outputs by name, see `match_classes`. Raises DataError and ConfigError
    for data or crops that do not fit.
    """
    settings = subject.experiment
    share = settings.optimizer.batch_size // (NUM_CROPS if protocol.ten_crops else 1) // process.world_size
    loader = build_val_loader(
        data,
        scale=protocol.scale,
        crop=protocol.crop,
        ten_crops=protocol.ten_crops,
        mean=settings.input.mean,
        std=settings.input.std,
        batch_size=batch_size or max(1, share),
        rank=process.rank,
        world_size=process.world_size,
        workers=workers,
        limit=limit,
        pin_memory=process.device.type == "cuda",
        on_bad_image=on_bad_image,
    )
    match_classes(loader.dataset, settings.network.classes, subject.class_names)
    check_agreement(
        process,
        lambda: {
            **program_facts(process, "validate"),
            "protocol": protocol.name,
            "training.amp": settings.training.amp,
            "--on-bad-image": on_bad_image,
            "weights": weights_digest(subject.model),
            "val": image_facts(loader.dataset, loader.batch_sampler.num_images),
        },
        "give every process the same command, weights and images",
    )
    with Progress(protocol.name, len(loader), show=process.is_main, every=print_freq) as progress:
        return validate(
            subject.model.to(process.device),
            loader,
            process.device,
            process.world_size,
            num_images=loader.batch_sampler.num_images,
            protocol=protocol,
            amp=settings.training.amp,
            advance=progress.advance,
            record=record,
        )
