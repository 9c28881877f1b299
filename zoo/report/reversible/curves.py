"""The curves of training runs, shortened to what is worth keeping: read from log folders or from a file of such curves.

A log folder holds megabytes of checkpoints and a record every few steps; a file of curves holds the settings of each
run, accuracy and loss of each epoch, and some of the reconstruction errors, and stands for the folders ever after.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config import Experiment, parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.errors import ConfigError
from zoo.report.writers import METRICS_FILE

NUM_RECONSTRUCTIONS = 12  # of those that a run has logged, evenly over its steps
TEXT_LOG = "training_0.log"
Epoch = dict[str, Any]


@dataclass(frozen=True)
class Curves:
    """One training run.

    - ``config``: its settings; ``environment``: the versions and the machine, None where nobody noted them.
    - ``status``: "finished", "stopped: " and why, or how many epochs there are.
    - ``epochs``: "epoch", from 1, "val_top1" and maybe "val_loss", "val_images", "train_top1", "train_loss";
      accuracies in percent, losses in nats per image.
    - ``reconstruction``: "step", "worst_relative_error" and the "errors" of the blocks.
    """

    config: Experiment
    status: str
    environment: dict[str, Any] | None
    epochs: tuple[Epoch, ...]
    reconstruction: tuple[dict[str, Any], ...] = ()

    def to_json(self, label: str) -> dict[str, Any]:
        """Return what a file of curves has about the run."""
        content = {
            "label": label,
            "seed": self.config.seed,
            "status": self.status,
            "settings": self.config.model_dump(mode="json", exclude_defaults=True),
            "config_digest": self.config.digest(),
            "environment": self.environment,
            "epochs": list(self.epochs),
        }
        return {**content, "reconstruction": list(self.reconstruction)} if self.reconstruction else content


def read_curves(path: Path) -> list[Curves]:
    """Return the run whose log folder ``path`` is, or those of a file of curves.

    ConfigError or CheckpointError for what is neither.
    """
    return [_of_folder(path)] if path.is_dir() or path.suffix != ".json" else _of_file(path)


def _of_folder(folder: Path) -> Curves:
    records = _read_metrics(folder / METRICS_FILE)
    config = parse_experiment(read(folder / CHECKPOINT)["config"], str(folder / CHECKPOINT))
    epochs: dict[int, Epoch] = {}
    steps: dict[int, dict[str, Any]] = {}
    environment = None
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
            epoch |= {"val_images": record["count"]} if "count" in record else {}
        elif event == "reconstruction":
            steps[record["step"]] = _reconstruction(record)
    validated = tuple(epochs[index] for index in sorted(epochs) if "val_top1" in epochs[index])
    kept = _evenly([steps[step] for step in sorted(steps)])
    return Curves(config, _status(folder, len(validated), config), environment, validated, tuple(kept))


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
            f"--runs: no metrics of a training run can be read ({error}); {path}: give folders that `zoo train "
            "--log-dir` wrote, or files of curves that `zoo reproduce` made of them"
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
        found = []
        for run in content["runs"]:
            for epoch in run["epochs"]:
                float(epoch["val_top1"]), int(epoch["epoch"])
            config = parse_experiment(run["settings"], str(path))
            environment = run.get("environment", content.get("environment"))
            reconstruction = tuple(run.get("reconstruction", ()))
            found.append(Curves(config, str(run["status"]), environment, tuple(run["epochs"]), reconstruction))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--runs: no curves of training runs can be read ({type(error).__name__}: {error}); {path}: give log "
            "folders, or files of curves that `zoo reproduce` made of them"
        ) from error
    return found
