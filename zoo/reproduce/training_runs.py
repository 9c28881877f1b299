"""Training runs: read from log folders, matched to experiments, stored in one file, and plotted.

Reads experiment.json and metrics.jsonl of log folders. A file of runs (PAPER_runs.json) can replace such folders: it
has the settings of each run, accuracy and loss of each epoch, and the angles between gradients.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zoo.benchmark.plot_style import Line, Panel, draw_panels
from zoo.config.architectures import ARCHITECTURES
from zoo.config.experiment import Experiment
from zoo.config.parse import load_experiment, parse_experiment
from zoo.errors import ConfigError, escape
from zoo.files import write_bytes, write_json
from zoo.run.environment import describe_environment
from zoo.run.log_folder import METRICS_FILE, SETTINGS_FILE
from zoo.tables import counted

logger = logging.getLogger(__name__)

# Settings in which runs of an experiment may differ, because they do not change the expected accuracy.
COMPUTATION = {"channels_last", "compile", "gradient_angle_meter"}
VARIABLE_SETTINGS = {
    "expected": True, "seed": True, "checkpoint": True, "network": {"memory"}, "training": COMPUTATION,
}  # fmt: skip
# Fields of `TrainingRun` that a runs file stores unchanged.
STORED = ("environment", "num_training_images", "num_validation_images", "epochs", "angles", "data")
Epoch = dict[str, Any]


@dataclass(frozen=True)
class TrainingRun:
    """One training run, with the data that reports use.

    Args:
    - `source`: path that the run was read from.
    - `config`: settings of the training.
    - `epochs`: for each validated epoch "epoch" (counted from 1), "val_top1" and, if recorded, "val_loss", "train_top1"
      and "train_loss"; accuracies in percent, losses in nats per image.
    - `environment`: versions and machine; None if not recorded.
    - `angles`: for some steps "step" and "degrees", the angle between the gradients from stored and from reconstructed
      activations; None if it is not finite.
    - `num_training_images`, `num_validation_images`: None if not recorded.
    - `data`: digests of the names of the training and validation images; empty if not recorded.
    - `experiment`: stem of the experiment file with these settings; empty until the run is matched to one.
    """

    source: str
    config: Experiment
    epochs: Sequence[Epoch]
    environment: dict[str, Any] | None = None
    angles: Sequence[dict[str, Any]] = ()
    num_training_images: int | None = None
    num_validation_images: int | None = None
    data: str = ""
    experiment: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether activations were stored (memory "plain") and not reconstructed."""
        return self.config.network.memory == "plain"

    @property
    def top1(self) -> list[float]:
        """Top-1 validation accuracy after each epoch, in percent."""
        return [float(epoch["val_top1"]) for epoch in self.epochs]

    @property
    def num_epochs(self) -> int:
        """Number of epochs of the whole training."""
        return self.config.optimizer.schedule.epochs

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch was validated."""
        return len(self.epochs) == self.num_epochs

    @property
    def label(self) -> str:
        """Name of the run in tables and plots."""
        return f"{self.group}, seed {self.config.seed}"

    @property
    def group(self) -> str:
        """Name shared by runs that differ only in their seed: experiment, changed settings, whether they store."""
        stem, _, changes = self.experiment.partition(" ")
        return ", ".join([stem, *_describe(json.loads(changes or "{}")), *["stored"] * self.is_stored])

    def line(self, x: Sequence[float], y: Sequence[float]) -> Line:
        """Return a curve of the run; runs that differ only in their seed share a label."""
        return Line(self.group, x, y)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of this run in a file of runs."""
        return {
            "label": self.group,
            "seed": self.config.seed,
            "status": "finished" if self.is_finished else f"{len(self.epochs)} of {counted(self.num_epochs, 'epoch')}",
            "settings": self.config.model_dump(mode="json", exclude={"expected"}),  # all of them: defaults may change
            **{key: getattr(self, key) for key in STORED},
        }


def read_runs(paths: Sequence[Path], names: Iterable[str]) -> list[TrainingRun]:
    """Read the runs of the experiments ``names`` that were validated at least once; warn of other runs.

    A run belongs to the experiment with the same settings, except for `VARIABLE_SETTINGS`. If several runs have all
    settings in common, the last run counts.

    Args:
    - `paths`: log folders of `zoo train`, and files of runs.
    - `names`: experiments, see `load_changed`.

    Raises ConfigError for any other path.
    """
    if not paths:
        return []
    experiments = {_settings(load_changed(name)): name for name in names}
    runs: dict[str, TrainingRun] = {}
    for run in (run for path in paths for run in read_path(path)):
        name = experiments.get(_settings(run.config))
        if name is None:
            logger.warning("left out: %s was trained with settings of no experiment of the papers", run.source)
        elif not run.epochs:
            logger.warning("left out: %s has no validation yet", run.source)
        else:
            run = replace(run, experiment=name)
            runs[run.label] = run
    return list(runs.values())


def load_changed(name: str) -> Experiment:
    """Load an experiment by the stem of its file, with optional changes to its settings.

    The changes follow as a JSON object: ``revnext_cifar10 {"network.options": {"blocks": [2, 2]}}``.
    """
    stem, _, changes = name.partition(" ")
    experiment = load_experiment(stem)
    content = experiment.model_dump(mode="json", exclude={"expected"})
    for setting, value in json.loads(changes or "{}").items():
        *path, last = setting.split(".")
        inner = content
        for key in path:
            inner = inner[key]
        inner[last] = value
    return parse_experiment(content, name) if changes else experiment


def _settings(config: Experiment) -> str:
    """Return the settings that distinguish experiments, with the defaults of omitted network options, as text."""
    content = config.model_dump(mode="json", exclude=VARIABLE_SETTINGS)  # type: ignore[arg-type]
    record = ARCHITECTURES.get(config.network.arch)
    content["network"]["options"] = {
        **(record.options().model_dump() if record else {}),
        **content["network"]["options"],
    }
    return json.dumps(content, sort_keys=True)


def _describe(changes: Mapping[str, Any]) -> Iterator[str]:
    """Yield changed settings of the network as text, such as "layers 1-2-2". Other settings are equal within a plot."""
    for setting, value in changes.items():
        if isinstance(value, dict):
            yield from _describe({f"{setting}.{key}": inner for key, inner in value.items()})
        elif setting.startswith("network."):
            text = "-".join(map(str, value)) if isinstance(value, list) else value
            yield f"{setting.rpartition('.')[2]} {text}"


def read_path(path: Path) -> list[TrainingRun]:
    """Read the run of a log folder, or the runs of a file. Raises ConfigError for other paths."""
    try:
        if path.is_dir():
            return [_read_folder(path)]
        return [_from_json(path, run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"training runs cannot be read ({type(error).__name__}: {error})",
            f"--runs {path}",
            "give log folders of `zoo train`, or PAPER_runs.json files that `zoo reproduce` wrote",
        ) from error


def _read_folder(folder: Path) -> TrainingRun:
    epochs: dict[int, Epoch] = {}
    angles: dict[int, dict[str, Any]] = {}
    environment = num_trained = num_scored = None
    data = ""
    # A repeated epoch or step, after an interruption, replaces the earlier one.
    for record in map(json.loads, (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()):
        event = record["event"]
        if event in ("start", "resume"):
            environment = record.get("environment") or environment
            images = record.get("images", {})
            data = ", ".join(f"{part} {facts['names']}" for part, facts in images.items()) or data
            num_trained = images.get("train", {}).get("images", num_trained)
        elif event == "train":
            epoch = epochs.setdefault(record["epoch"], {"epoch": record["epoch"] + 1})
            epoch |= {"train_loss": record["epoch_loss"], "train_top1": record["epoch_top1"]}
        elif event == "validation":
            epoch = epochs.setdefault(record["epoch"], {"epoch": record["epoch"] + 1})
            epoch |= {"val_loss": record.get("loss"), "val_top1": float(record["top1"])}
            num_scored = record.get("count", num_scored)
        elif event == "gradient_angle":
            angles[record["step"]] = {"step": record["step"], "degrees": record["degrees"]}
    return TrainingRun(
        source=escape(folder),
        config=load_experiment(folder / SETTINGS_FILE),
        environment=environment,
        epochs=[epochs[index] for index in sorted(epochs) if "val_top1" in epochs[index]],
        angles=[angles[step] for step in sorted(angles)],
        num_training_images=num_trained,
        num_validation_images=num_scored,
        data=data,
    )


def _from_json(path: Path, run: dict[str, Any]) -> TrainingRun:
    """Return a run of a file."""
    for epoch in run["epochs"]:
        float(epoch["val_top1"]), int(epoch["epoch"])
    return TrainingRun(
        source=escape(path),
        config=parse_experiment(run["settings"], escape(path)),
        **{key: run[key] for key in STORED if key in run},
    )


def environment_of(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Return versions and machine of the runs; different values are joined by commas.

    Empty if none was recorded.
    """
    values: dict[str, list[Any]] = {}
    for run in runs:
        for key, value in (run.environment or {}).items():
            values.setdefault(key, [])
            values[key] += [value] if value not in values[key] else []
    return {key: each[0] if len(each) == 1 else ", ".join(map(str, each)) for key, each in values.items()}


def write_runs(folder: Path, name: str, command: str, runs: Sequence[TrainingRun]) -> str:
    """Write NAME_runs.json, a replacement for the log folders of the runs; return the name of the file."""
    content = {
        "benchmark": f"{name} runs",
        "command": command,
        "environment": describe_environment(torch.device("cpu")),
        "runs": [run.to_json() for run in runs],
    }
    file = f"{name}_runs.json"
    write_json(folder / file, content)
    return file


def draw_runs(folder: Path, name: str, title: str, runs: Sequence[TrainingRun]) -> str:
    """Plot the runs (at least one) to NAME_runs.png; return the name of the file. Needs matplotlib."""
    panels = [panel for group in groups_of(runs) for panel in _panels(group)]
    file = f"{name}_runs.png"
    write_bytes(folder / file, draw_panels(title, panels))
    return file


def groups_of(runs: Sequence[TrainingRun]) -> list[list[TrainingRun]]:
    """Return groups of comparable runs: equal training settings, any network and seed."""
    groups: dict[str, list[TrainingRun]] = {}
    for run in runs:
        settings = run.config.model_dump(mode="json", include={"optimizer", "input"})
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    return list(groups.values())


def _panels(runs: Sequence[TrainingRun]) -> list[Panel]:
    """Return the panels of top-1 and, if recorded, of the training loss over the epochs."""
    top1, losses = [], []
    for run in runs:
        top1.append(run.line([epoch["epoch"] for epoch in run.epochs], run.top1))
        recorded = [epoch for epoch in run.epochs if epoch.get("train_loss") is not None]
        if recorded:
            values = [float(epoch["train_loss"]) for epoch in recorded]
            losses.append(run.line([epoch["epoch"] for epoch in recorded], values))
    title = f"{', '.join(dict.fromkeys(run.config.network.arch for run in runs))}, {runs[0].num_epochs} epochs"
    panels = [Panel(title, "epoch", "top-1, validation images, %", top1)]
    return panels + [Panel(title, "epoch", "mean training loss", losses)] * bool(losses)
