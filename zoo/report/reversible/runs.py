"""Training runs, matched to the experiment files whose settings they had."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo.config import Experiment, experiments_dir, load_experiment
from zoo.report.reversible.curves import Curves, read_curves

# What runs of one experiment may differ in: nothing of it changes what a run computes on the average.
FREE = {"expected": True, "seed": True, "network": {"memory"}, "training": {"reconstruction_meter"}}


@dataclass(frozen=True)
class Run:
    """A run of ``experiment`` (the stem of its file): top-1 in percent after each epoch, of ``num_epochs`` in all."""

    experiment: str
    is_stored: bool  # memory "plain": activations are kept
    seed: int
    top1: tuple[float, ...]
    num_epochs: int
    curves: Curves | None = field(default=None, compare=False)

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch was validated."""
        return len(self.top1) == self.num_epochs

    @property
    def label(self) -> str:
        """The name of the run in a table or picture."""
        return f"{self.experiment}{', stored' * self.is_stored}, seed {self.seed}"


def read_runs(paths: Sequence[Path], names: Iterable[str]) -> tuple[list[Run], list[str]]:
    """Return the runs of experiments in ``names`` that were validated at least once, a remark on each other one.

    A path is a log folder of `zoo train`, or a file of curves (`zoo.report.reversible.curves`). The settings of a run
    are those that it was trained with; seed, memory and meter may be others than in the experiment's file.
    ConfigError or CheckpointError for a path that is neither.
    """
    experiments = _experiments(names) if paths else {}
    given = {path.resolve(): path for path in paths}.values()  # each once
    found = [(path, curves) for path in given for curves in read_curves(path)]
    runs, remarks = [], []
    for path, curves in found:
        config = curves.config
        name = experiments.get(_settings(config))
        if name is None:
            remarks.append(f"left out: {path} was trained with settings of no experiment in this report")
        elif not curves.epochs:
            remarks.append(f"left out: {path} has no validation yet")
        else:
            top1 = tuple(float(epoch["val_top1"]) for epoch in curves.epochs)
            is_stored, epochs = config.network.memory == "plain", config.optimizer.schedule.epochs
            runs.append(Run(name, is_stored, config.seed, top1, epochs, curves))
    return runs, remarks


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train experiments/{experiment}.json DATA --log-dir runs/{experiment}"


def _experiments(names: Iterable[str]) -> dict[str, str]:
    """Return the names by the settings in their experiment files."""
    return {_settings(load_experiment(experiments_dir() / f"{name}.json")): name for name in names}


def _settings(config: Experiment) -> str:
    return json.dumps(config.model_dump(mode="json", exclude=FREE), sort_keys=True)  # type: ignore[arg-type]
