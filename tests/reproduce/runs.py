"""Training runs to test with: their log folders, and the values read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zoo.config.parse import experiments_dir, load_experiment, parse_experiment
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.training_runs import TrainingRun

EXPERIMENT = "revnet38_cifar10_short"


def settings_of(name: str, seed: int = 1, **network: Any) -> dict[str, Any]:
    """Return the settings of an experiment with another seed and other settings of the network."""
    settings = load_experiment(experiments_dir() / f"{name}.json").model_dump(mode="json")
    return {**settings, "seed": seed, "network": {**settings["network"], **network}}


def make_run(folder: Path, top1: list[float], name: str = EXPERIMENT, **changes: Any) -> Path:
    """Write the log folder of a training run of an experiment; for ``changes``, see `settings_of`."""
    config = settings_of(name, **changes)
    folder.mkdir()
    (folder / "experiment.json").write_text(json.dumps(config))
    images = {"train": {"images": 500, "names": "12ab"}}
    records = [
        {"event": "start", "images": images},
        *({"event": "validation", "epoch": e, "top1": t} for e, t in enumerate(top1)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def run_of(
    name: str, top1: float, *, num_epochs: int | None = None, seed: int = 1, memory: str = "auto", **counts: int
) -> TrainingRun:
    """Return a run with the same accuracy after all epochs; ``counts`` are numbers of images."""
    config = parse_experiment(settings_of(name, seed, memory=memory), "test")
    num_epochs = num_epochs or config.optimizer.schedule.epochs
    epochs = [{"epoch": index + 1, "val_top1": top1} for index in range(num_epochs)]
    return TrainingRun("test", config, epochs, experiment=name, **counts)


def by_key(section: ReportSection) -> dict[str, Comparison]:
    """Return the first comparison with each published number, which is the number's row in the scoreboard.

    The keys are the ids of the numbers without the name of the paper.
    """
    found: dict[str, Comparison] = {}
    for comparison in section.comparisons:
        found.setdefault(comparison.published.id.partition("/")[2], comparison)
    return found
