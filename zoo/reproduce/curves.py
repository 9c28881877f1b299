"""The curves of training runs, shortened to what is worth keeping: read from log folders or from a file of such curves.

A log folder holds megabytes of checkpoints and a record every few steps; a file of curves holds the settings of each
run, accuracy and loss of each epoch, and some of the reconstruction errors, and stands for the folders ever after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config import Experiment, parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.errors import ConfigError, printable
from zoo.report.log_folder import METRICS_FILE

NUM_RECONSTRUCTIONS = 12  # of those that a run has logged, evenly over its steps
TEXT_LOG = "training_0.log"
Epoch = dict[str, Any]


@dataclass(frozen=True)
class Curves:
    """One training run.

    - ``label``: the path that it was read from, and in a file of several which of them it is.
    - ``config``: its settings; ``environment``: the versions and the machine, None where nobody noted them.
    - ``status``: "finished", "stopped: " and why, how many epochs there are, or "unknown".
    - ``epochs``: "epoch", from 1, "val_top1" and maybe "val_loss", "train_top1", "train_loss";
      accuracies in percent, losses in nats per image.
    - ``reconstruction``: "step", "worst_relative_error" and the "errors" of the blocks.
    - ``note``: what a reader has to know about the run, maybe nothing; the numbers of images, None where nobody noted
      them.
    """

    label: str
    config: Experiment
    status: str
    environment: dict[str, Any] | None
    epochs: tuple[Epoch, ...]
    reconstruction: tuple[dict[str, Any], ...] = ()
    note: str = ""
    num_training_images: int | None = None
    num_validation_images: int | None = None

    def to_json(self, label: str) -> dict[str, Any]:
        """Return what a file of curves has about the run."""
        content = {
            "label": label,
            "seed": self.config.seed,
            "status": self.status,
            "settings": self.config.model_dump(mode="json", exclude={"expected"}),  # all: defaults may change
            "config_digest": self.config.digest(),
            "environment": self.environment,
            "num_training_images": self.num_training_images,
            "num_validation_images": self.num_validation_images,
            "epochs": list(self.epochs),
        }
        extras = {"note": self.note, "reconstruction": list(self.reconstruction)}
        return {**content, **{key: value for key, value in extras.items() if value}}


def read_all_curves(paths: Sequence[Path]) -> list[Curves]:
    """Return the runs whose log folders the ``paths`` are, and those of files of curves; each path is read once.

    ConfigError or CheckpointError for what is neither.
    """
    given: dict[Path, Path] = {}
    for path in paths:
        given.setdefault(path.resolve(), path)
    return [curves for path in given.values() for curves in (_of_file(path) if path.is_file() else [_of_folder(path)])]


def _of_folder(folder: Path) -> Curves:
    records = _read_metrics(folder / METRICS_FILE)
    config = parse_experiment(read(folder / CHECKPOINT)["config"], str(folder / CHECKPOINT))
    epochs: dict[int, Epoch] = {}
    steps: dict[int, dict[str, Any]] = {}
    environment = num_scored = None
    for record in records:  # what was run again after an interruption replaces what was there
        event = record["event"]
        if event in ("start", "resume"):
            environment = record.get("environment", environment)
        elif event == "train":
            epoch = epochs.setdefault(record["epoch"], {"epoch": record["epoch"] + 1})
            epoch |= {"train_loss": record["epoch_loss"], "train_top1": record["epoch_top1"]}
        elif event == "validation":
            epoch = epochs.setdefault(record["epoch"], {"epoch": record["epoch"] + 1})
            epoch |= {"val_loss": record.get("loss"), "val_top1": float(record["top1"])}
            num_scored = record.get("count", num_scored)
        elif event == "reconstruction":
            steps[record["step"]] = _reconstruction(record)
    validated = tuple(epochs[index] for index in sorted(epochs) if "val_top1" in epochs[index])
    kept = _evenly([steps[step] for step in sorted(steps)])
    status = _status(folder, len(validated), config)
    return Curves(
        printable(folder), config, status, environment, validated, tuple(kept), num_validation_images=num_scored
    )


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, all of which have the keys that are read."""
    needed = {"train": ("epoch", "epoch_loss", "epoch_top1"), "validation": ("epoch", "top1"),
              "reconstruction": ("step", "errors")}  # fmt: skip
    try:
        records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for record in records:
            for key in needed.get(record["event"], ()):
                record[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--runs: no metrics of a training run can be read ({error}); {printable(path)}: give folders that "
            "`zoo train --log-dir` wrote, or files of curves that `zoo reproduce` made of them"
        ) from error
    return records


def _reconstruction(record: dict[str, Any]) -> dict[str, Any]:
    errors = record["errors"].values()
    worst = None if None in errors else max(errors, default=0.0)  # the log has null for what is not finite
    return {"step": record["step"], "worst_relative_error": worst, "errors": record["errors"]}


def _evenly(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `NUM_RECONSTRUCTIONS` of the items, the first and the last among them."""
    last, count = len(items) - 1, min(len(items), NUM_RECONSTRUCTIONS)
    return [items[round(index * last / max(1, count - 1))] for index in range(count)]


def _status(folder: Path, num_done: int, config: Experiment) -> str:
    num_epochs = config.optimizer.schedule.epochs
    if num_done == num_epochs:
        return "finished"
    log = folder / TEXT_LOG
    stops = re.findall(r"stopped: .*", log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    return stops[-1] if stops else f"{num_done} of {num_epochs} epochs"


def _of_file(path: Path) -> list[Curves]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [_of_json(path, run, content) for run in content["runs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--runs: no shortened logs of training runs can be read ({type(error).__name__}: {error}); "
            f"{printable(path)}: give log folders of `zoo train`, or files of curves that `zoo reproduce` made of them"
        ) from error


def _of_json(path: Path, run: dict[str, Any], content: dict[str, Any]) -> Curves:
    """Return a run of a file; what all its runs share may stand once, in the ``content`` around them."""
    label = f"{printable(path)}: {printable(run['label'])}, seed {int(run['seed'])}"
    for epoch in run["epochs"]:
        float(epoch["val_top1"]), int(epoch["epoch"])
    counts = (run.get(key, content.get(key)) for key in ("num_training_images", "num_validation_images"))
    return Curves(
        label,
        parse_experiment(run["settings"], label),
        str(run.get("status", "unknown")),
        run.get("environment", content.get("environment")),
        tuple(run["epochs"]),
        tuple(run.get("reconstruction", ())),
        str(run.get("note", "")),
        *(None if count is None else int(count) for count in counts),
    )
