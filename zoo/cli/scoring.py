"""Scoring a named network with its weights, as several commands do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo import registry
from zoo.config import Experiment, experiment_names, find_experiment, load_experiment, parse_experiment
from zoo.data.folder import Batch, OnBadImage, check_num_classes
from zoo.data.loader import NUM_CROPS, build_val_loader
from zoo.engine.agreement import check_agreement, image_facts, program_facts, weights_digest
from zoo.engine.process import Process
from zoo.engine.protocols import Protocol
from zoo.engine.validate import Result, validate
from zoo.errors import ConfigError, WeightsError, nearest, printable
from zoo.report.console import Progress
from zoo.report.environment import describe_environment
from zoo.weights import load_weights, locate_weights, md5_of, read_checkpoint


@dataclass(frozen=True)
class Subject:
    """A network with weights, its experiment (all defaults for a bare architecture), the file of the weights."""

    title: str
    model: nn.Module
    experiment: Experiment
    weights: Path | None

    @property
    def own_protocol(self) -> Protocol:
        """The centre crop that the experiment validates with."""
        return Protocol(self.experiment.input.scale_val, self.experiment.input.crop_val, ten_crops=False)

    def result_json(self, result: Result, process: Process) -> dict[str, Any]:
        """Return the contents of a result file."""
        published = registry.published().get(self.title, {}).get("md5")
        md5 = published if self.weights is None else md5_of(self.weights)
        return result.to_json(md5, describe_environment(process.device))


def load_subject(name: str, weights: Path | None = None) -> Subject:
    """Return the network ``name`` with the weights of a file or a published name, by default its own published ones.

    ``name``: an experiment file (.json), the name of one of the experiments, a checkpoint of the trainer (whose
    own weights are the default), or an architecture. Raises ConfigError for an unknown name and WeightsError for
    weights that are missing or do not fit, the classifier included.
    """
    weights = None if weights is None else locate_weights(weights)
    file = find_experiment(name)
    if file is not None:
        title, experiment = file.stem, load_experiment(file)
    elif Path(name).is_file():
        title, experiment = name, _experiment_of(Path(name))
        weights = weights or Path(name)
    else:
        title, experiment = name, Experiment()
        return Subject(title, _architecture(name, weights), experiment, weights)
    if weights is None:
        return Subject(title, _published(title), experiment, None)
    model = registry.build_from_config(experiment.network)
    _load(model, weights)
    return Subject(title, model, experiment, weights)


def _experiment_of(checkpoint: Path) -> Experiment:
    settings = read_checkpoint(checkpoint).get("config")
    if not isinstance(settings, dict):
        raise WeightsError(
            f"the file does not say which network it belongs to; {checkpoint}: name the network or its experiment, "
            "and give the file as its --weights"
        )
    return parse_experiment(settings, str(checkpoint))


def _architecture(name: str, weights: Path | None) -> nn.Module:
    known = {*registry.list_models(), *experiment_names()}
    if name not in known and os.sep not in name:
        raise ConfigError(
            f"there is no network, experiment or file called {printable(name)}; the nearest names are "
            f"{', '.join(nearest(name, sorted(known)))} (zoo list shows all networks)"
        )
    model = registry.get(name, pretrained=weights is None)
    if weights is not None:
        _load(model, weights)
    return model


def _published(title: str) -> nn.Module:
    if title not in registry.published():
        raise WeightsError(
            f"there are no published weights of {title}; command line: give those to score, --weights FILE"
        )
    return registry.get(title, pretrained=True)


def _load(model: nn.Module, weights: Path) -> None:
    """Load a file strictly; of a run with a moving average this is that average, which its validations scored."""
    report = load_weights(model, weights)
    if report.classifier != "loaded":
        raise WeightsError(
            f"the classifier of the file does not fit the network; {weights}: "
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
    """Return the scores on the pictures of ``data``/val that all processes have together.

    ``batch_size``: pictures at once per process; default the experiment's batch size (a tenth of it for ten
    crops) over the number of processes. ``record`` is called with each batch of this process and its logits.
    Raises DataError and ConfigError for data or crops that do not fit.
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
    check_num_classes(loader.dataset, settings.network.classes)
    check_agreement(
        process,
        lambda: {
            **program_facts(process, "validate"),
            "protocol": protocol.name,
            "training.amp": settings.training.amp,
            "--on-bad-image": on_bad_image,
            "weights": weights_digest(subject.model),
            "val": image_facts(loader.dataset, loader.batch_sampler.num_pictures),
        },
        "give every process the same command, weights and images",
    )
    with Progress(protocol.name, len(loader), show=process.is_main, every=print_freq) as progress:
        return validate(
            subject.model.to(process.device),
            loader,
            process.device,
            process.world_size,
            num_pictures=loader.batch_sampler.num_pictures,
            protocol=protocol,
            amp=settings.training.amp,
            advance=progress.advance,
            record=record,
        )
