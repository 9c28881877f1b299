"""Training runs, found in their log folders and matched to the experiment files whose settings they had."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zoo.config import Experiment, experiments_dir, load_experiment, parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.errors import ConfigError, printable
from zoo.report.writers import METRICS_FILE

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

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch was validated."""
        return len(self.top1) == self.num_epochs

    @property
    def label(self) -> str:
        """The name of the run in a table or picture."""
        return f"{self.experiment}{', stored' * self.is_stored}, seed {self.seed}"


class _Record(NamedTuple):
    """What was left of a run: its settings, and the rest in the words of `Run`."""

    label: str
    config: Experiment
    top1: tuple[float, ...]
    num_training_images: int | None
    num_validation_images: int | None
    note: str = ""


def read_runs(paths: Sequence[Path], names: Iterable[str]) -> tuple[list[Run], list[str]]:
    """Return the runs of experiments in ``names`` that were validated at least once, and remarks on the others.

    ``paths`` are log folders of `zoo train`, whose settings are those in the checkpoint, and files of shortened logs
    as scripts/results has them; what a file notes on a run is a remark too.  Seed, memory and meter may be others than
    in the experiment.  Remarks name paths as they were given.  ConfigError or CheckpointError for anything else.
    """
    experiments = _experiments(names) if paths else {}
    given: dict[Path, Path] = {}  # each once
    for path in paths:
        given.setdefault(path.resolve(), path)
    runs, remarks = [], []
    for path in given.values():
        for record in _read_file(path) if path.is_file() else [_read_folder(path)]:
            name = experiments.get(_settings(record.config))
            if name is None:
                remarks.append(f"left out: {record.label} was trained with settings of no experiment in this report")
            elif not record.top1:
                remarks.append(f"left out: {record.label} has no validation yet")
            else:
                runs.append(_run(name, record))
                remarks += [f"{record.label}: {record.note}"] if record.note else []
    return runs, remarks


def _run(name: str, record: _Record) -> Run:
    config = record.config
    is_stored, epochs = config.network.memory == "plain", config.optimizer.schedule.epochs
    counts = record.num_training_images, record.num_validation_images
    return Run(name, is_stored, config.seed, record.top1, epochs, *counts)


def _read_folder(folder: Path) -> _Record:
    """Return the run of a log folder."""
    top1, count = _read_validations(folder / METRICS_FILE)
    config = parse_experiment(read(folder / CHECKPOINT)["config"], str(folder / CHECKPOINT))
    return _Record(printable(folder), config, tuple(top1), None, count)


def _read_file(path: Path) -> list[_Record]:
    """Return the runs of a file of shortened logs."""
    records = []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        counts = int(content["num_training_images"]), int(content["num_validation_images"])
        for run in content["runs"]:
            label = f"{printable(path)}: {printable(run['label'])}, seed {int(run['seed'])}"
            top1 = tuple(float(epoch["val_top1"]) for epoch in run["epochs"])
            config = parse_experiment(run["settings"], label)
            records.append(_Record(label, config, top1, *counts, printable(run.get("note", ""))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--runs: no shortened logs of training runs can be read ({type(error).__name__}: {error}); "
            f"{printable(path)}: give log folders of `zoo train`, or files as scripts/results has them"
        ) from error
    return records


def command_of(experiment: str) -> str:
    """Return the command that trains an experiment; DATA is a folder with train/ and val/."""
    return f"zoo train experiments/{experiment}.json DATA --log-dir runs/{experiment}"


def _experiments(names: Iterable[str]) -> dict[str, str]:
    """Return the names by the settings in their experiment files."""
    return {_settings(load_experiment(experiments_dir() / f"{name}.json")): name for name in names}


def _settings(config: Experiment) -> str:
    return json.dumps(config.model_dump(mode="json", exclude=FREE), sort_keys=True)  # type: ignore[arg-type]


def _read_validations(path: Path) -> tuple[list[float], int | None]:
    """Return the top-1 of a run's epochs, of which one that was run again counts once, and the pictures scored."""
    top1: dict[int, float] = {}
    count = None
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["event"] == "validation":
                top1[int(record["epoch"])] = float(record["top1"])
                count = record.get("count", count)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--runs: no metrics of a training run can be read ({error}); {path}: give folders that `zoo train "
            "--log-dir` wrote"
        ) from error
    return [top1[epoch] for epoch in sorted(top1)], count
