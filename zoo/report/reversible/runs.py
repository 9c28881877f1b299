"""Training runs, found in their log folders and matched to the experiment files whose settings they had."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config import Experiment, experiments_dir, load_experiment, parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.errors import ConfigError
from zoo.report.writers import METRICS_FILE

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

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch was validated."""
        return len(self.top1) == self.num_epochs

    @property
    def label(self) -> str:
        """The name of the run in a table or picture."""
        return f"{self.experiment}{', stored' * self.is_stored}, seed {self.seed}"


def read_runs(folders: Sequence[Path], names: Iterable[str]) -> tuple[list[Run], list[str]]:
    """Return the runs of experiments in ``names`` that were validated at least once, a remark on each other folder.

    The settings of a run are those in its checkpoint; seed, memory and meter may be others than in the file.
    ConfigError or CheckpointError for a folder that is no log folder of `zoo train`.
    """
    experiments = _experiments(names) if folders else {}
    given = dict.fromkeys(folder.resolve() for folder in folders)  # each once
    runs, remarks = [], []
    for folder in given:
        top1 = _read_top1(folder / METRICS_FILE)
        config = parse_experiment(read(folder / CHECKPOINT)["config"], str(folder / CHECKPOINT))
        name = experiments.get(_settings(config))
        if name is None:
            remarks.append(f"left out: {folder} was trained with settings of no experiment in this report")
        elif not top1:
            remarks.append(f"left out: {folder} has no validation yet")
        else:
            is_stored, epochs = config.network.memory == "plain", config.optimizer.schedule.epochs
            runs.append(Run(name, is_stored, config.seed, tuple(top1), epochs))
    return runs, remarks


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train {experiment} DATA"


def _experiments(names: Iterable[str]) -> dict[str, str]:
    """Return the names by the settings in their experiment files."""
    return {_settings(load_experiment(experiments_dir() / f"{name}.json")): name for name in names}


def _settings(config: Experiment) -> str:
    return json.dumps(config.model_dump(mode="json", exclude=FREE), sort_keys=True)  # type: ignore[arg-type]


def _read_top1(path: Path) -> list[float]:
    """Return the top-1 of a run's epochs; one that was run again counts once."""
    top1: dict[int, float] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["event"] == "validation":
                top1[int(record["epoch"])] = float(record["top1"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--runs: no metrics of a training run can be read ({error}); {path}: give folders that `zoo train "
            "--log-dir` wrote"
        ) from error
    return [top1[epoch] for epoch in sorted(top1)]
