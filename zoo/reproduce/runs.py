"""Training runs, matched to the experiment files whose settings they had."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo.config import Experiment, experiments_dir, load_experiment
from zoo.errors import printable
from zoo.reproduce.curves import Curves, read_all_curves
from zoo.reproduce.schema import Line

# What runs of one experiment may differ in: nothing of it changes what a run computes on the average.
FREE = {"expected": True, "seed": True, "network": {"memory"}, "training": {"reconstruction_meter"}}


@dataclass(frozen=True)
class Run:
    """A run of ``experiment`` (the stem of its file): top-1 in percent after each epoch, of ``num_epochs`` in all.

    The numbers of images are None where the run's record does not have them.
    """

    experiment: str
    is_stored: bool  # memory "plain": activations are kept
    seed: int
    top1: tuple[float, ...]
    num_epochs: int
    num_training_images: int | None = None
    num_validation_images: int | None = None
    curves: Curves | None = field(default=None, compare=False)

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch was validated."""
        return len(self.top1) == self.num_epochs

    @property
    def label(self) -> str:
        """The name of the run in a table or plot."""
        return f"{self.group}, seed {self.seed}"

    @property
    def group(self) -> str:
        """What runs that differ in their seed alone have in common: the experiment, and whether it stores."""
        return f"{self.experiment}{', stored' * self.is_stored}"

    @property
    def stop_reason(self) -> str:
        """A note on why the run ended early, as its log has it; empty for all other runs."""
        parts = self.curves.status.split(": ") if self.curves is not None else []
        return f"stopped: {parts[2]}" if parts[0:1] == ["stopped"] and len(parts) > 2 else ""

    def line(self, x: Sequence[float], y: Sequence[float], note: str = "") -> Line:
        """Return a curve of the run."""
        return Line(self.label, x, y, group=self.group, note=note)


def read_runs(paths: Sequence[Path], names: Iterable[str]) -> tuple[list[Run], list[str]]:
    """Return the runs of experiments in ``names`` that were validated at least once, and remarks on the others.

    ``paths`` are log folders of `zoo train`, and files of curves that stand for such folders; what a file notes on a
    run is a remark too. The settings of a run are those that it was trained with; seed, memory and meter may be others
    than in the experiment. Remarks name paths as they were given. ConfigError or CheckpointError for anything else.
    """
    experiments = _experiments(names) if paths else {}
    runs, remarks = [], []
    for curves in read_all_curves(paths):
        name = experiments.get(_settings(curves.config))
        if name is None:
            remarks.append(f"left out: {curves.label} was trained with settings of no experiment in this report")
        elif not curves.epochs:
            remarks.append(f"left out: {curves.label} has no validation yet")
        else:
            runs.append(_run(name, curves))
            remarks += [f"{curves.label}: {printable(curves.note)}"] if curves.note else []
    return runs, remarks


def _run(name: str, curves: Curves) -> Run:
    config, top1 = curves.config, tuple(float(epoch["val_top1"]) for epoch in curves.epochs)
    is_stored, epochs = config.network.memory == "plain", config.optimizer.schedule.epochs
    counts = curves.num_training_images, curves.num_validation_images
    return Run(name, is_stored, config.seed, top1, epochs, *counts, curves)


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train {experiment} DATA"


def _experiments(names: Iterable[str]) -> dict[str, str]:
    """Return the names by the settings in their experiment files."""
    return {_settings(load_experiment(experiments_dir() / f"{name}.json")): name for name in names}


def _settings(config: Experiment) -> str:
    return json.dumps(config.model_dump(mode="json", exclude=FREE), sort_keys=True)  # type: ignore[arg-type]
