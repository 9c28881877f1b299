"""Training runs: read from log folders, matched to experiments, stored in one file, and plotted.

Of a log folder, experiment.json, metrics.jsonl and the text log are read. A file of runs (PAPER_runs.json) replaces
such folders: for each run it has the settings, accuracy and loss of each epoch, and a part of the reconstruction errors
and gradient angles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zoo.config import Experiment, load_experiment, parse_experiment
from zoo.errors import ConfigError, escape
from zoo.files import write_bytes, write_json
from zoo.run.cost import total_cost
from zoo.run.environment import describe_environment
from zoo.run.log_folder import METRICS_FILE, SETTINGS_FILE
from zoo.run.plot_style import Line, Panel, draw_panels
from zoo.spec.architectures import ARCHITECTURES

# Number of evenly spaced records that are stored per run.
NUM_RECONSTRUCTIONS, NUM_ANGLES = 12, 160
TEXT_LOG = "training_0.log"
# Settings in which runs of an experiment may differ, because they do not change the expected accuracy.
COMPUTATION = {
    "channels_last", "compile", "reconstruction_meter", "gradient_angle_meter",
}  # fmt: skip
VARIABLE_SETTINGS = {
    "expected": True, "seed": True, "checkpoint": True, "network": {"memory"}, "training": COMPUTATION,
}  # fmt: skip
# Required keys of the records of each event.
REQUIRED_KEYS = {
    "train": ("epoch", "epoch_loss", "epoch_top1"), "validation": ("epoch", "top1"),
    "reconstruction": ("step", "errors"), "gradient_angle": ("step", "degrees"),
    "end": ("seconds", "gpu_seconds"),
}  # fmt: skip
Epoch = dict[str, Any]


@dataclass(frozen=True)
class TrainingRun:
    """One training run, with the data that reports use.

    Args:
    - `source`: path that the run was read from, with its label and seed for a file of several runs.
    - `config`: settings of the training.
    - `status`: "finished", "stopped: " and the reason, "N of M epochs", or "unknown".
    - `environment`: versions and machine; None if not recorded.
    - `epochs`: for each validated epoch "epoch" (counted from 1), "val_top1" and, if recorded, "val_loss", "train_top1"
      and "train_loss"; accuracies in percent, losses in nats per image.
    - `reconstruction`: for some steps "step", "worst_relative_error" and the "errors" of the blocks.
    - `angles`: for some steps "step" and "degrees", the angle between the gradients from stored and from reconstructed
      activations; None if it is not finite.
    - `num_training_images`, `num_validation_images`: None if not recorded.
    - `data`: digests of the names of the training and validation images; empty if not recorded.
    - `cost`: see `zoo.run.cost.CostMeter`; of a process that was killed, the time until its last record. None if that
      was not recorded.
    - `experiment`: stem of the experiment file with these settings; empty until the run is matched to one.
    """

    source: str
    config: Experiment
    status: str
    environment: dict[str, Any] | None
    epochs: Sequence[Epoch]
    reconstruction: Sequence[dict[str, Any]] = ()
    angles: Sequence[dict[str, Any]] = ()
    num_training_images: int | None = None
    num_validation_images: int | None = None
    data: str = ""
    cost: dict[str, Any] | None = None
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
        """Name shared by runs that differ only in their seed: experiment, changed settings, whether it stores."""
        stem, _, changes = self.experiment.partition(" ")
        return ", ".join([stem, *_describe(json.loads(changes or "{}")), *["stored"] * self.is_stored])

    @property
    def stop_reason(self) -> str:
        """Reason why the run ended early, according to its log, without the advice; empty for other runs."""
        parts = self.status.split(": ")
        return f"stopped: {parts[2].partition(';')[0]}" if parts[0] == "stopped" and len(parts) > 2 else ""

    def line(self, x: Sequence[float], y: Sequence[float], note: str = "") -> Line:
        """Return a curve of the run."""
        return Line(self.label, x, y, group=self.group, note=note)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of this run in a file of runs."""
        content = {
            "label": self.group,
            "seed": self.config.seed,
            "status": self.status,
            "settings": self.config.model_dump(mode="json", exclude={"expected"}),  # all of them: defaults may change
            "config_digest": self.config.digest(),
            "environment": self.environment,
            "num_training_images": self.num_training_images,
            "num_validation_images": self.num_validation_images,
            "epochs": list(self.epochs),
        }
        extras = {"reconstruction": list(self.reconstruction), "angles": list(self.angles),
                  "data": self.data, "cost": self.cost}  # fmt: skip
        return {**content, **{key: value for key, value in extras.items() if value}}


def read_runs(
    paths: Sequence[Path], names: Iterable[str], others: Iterable[str] = ()
) -> tuple[list[TrainingRun], list[str]]:
    """Return the runs of the experiments ``names`` that were validated at least once, and remarks on skipped runs.

    A run belongs to the experiment with the same settings, except for `VARIABLE_SETTINGS`.

    Args:
    - `paths`: log folders of `zoo train`, and files of runs; each is read once.
    - `names`: experiments, see `load_changed`.
    - `others`: experiments whose runs are skipped without a remark.

    Raises ConfigError for any other path.
    """
    if not paths:
        return [], []
    experiments, elsewhere = ({_settings(load_changed(name)): name for name in group} for group in (names, others))
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    runs, remarks = [], []
    for run in (run for path in once.values() for run in read_path(path)):
        settings = _settings(run.config)
        name = experiments.get(settings)
        if name is None and settings in elsewhere:
            continue
        if name is None:
            remarks.append(f"left out: {run.source} was trained with settings of no experiment in this report")
        elif not run.epochs:
            remarks.append(f"left out: {run.source} has no validation yet")
        else:
            runs.append(replace(run, experiment=name))
    return runs, remarks


def load_changed(name: str) -> Experiment:
    """Return an experiment by the stem of its file, with optional changes of its settings.

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
    """Yield changed settings of the network as text: "layers 1-2-2"; all others are the same in a plot."""
    for setting, value in changes.items():
        if isinstance(value, dict):
            yield from _describe({f"{setting}.{key}": inner for key, inner in value.items()})
        elif setting.startswith("network."):
            text = "-".join(map(str, value)) if isinstance(value, list) else value
            yield f"{setting.rpartition('.')[2]} {text}"


def read_path(path: Path) -> list[TrainingRun]:
    """Return the run of a log folder, or the runs of a file; raises ConfigError for other paths."""
    return _read_file(path) if path.is_file() else [_read_folder(path)]


def _read_folder(folder: Path) -> TrainingRun:
    records = _read_metrics(folder / METRICS_FILE)
    config = load_experiment(folder / SETTINGS_FILE)
    epochs: dict[int, Epoch] = {}
    reconstructions: dict[int, dict[str, Any]] = {}
    angles: dict[int, dict[str, Any]] = {}
    environment = num_trained = num_scored = None
    data = ""
    for record in records:  # an epoch or step that was repeated after an interruption replaces the earlier one
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
        elif event == "reconstruction":
            errors = record["errors"].values()  # null: not finite
            worst = None if None in errors else max(errors, default=0.0)
            step = {"step": record["step"], "worst_relative_error": worst, "errors": record["errors"]}
            reconstructions[record["step"]] = step
        elif event == "gradient_angle":
            angles[record["step"]] = {"step": record["step"], "degrees": record["degrees"]}
    validated = [epochs[index] for index in sorted(epochs) if "val_top1" in epochs[index]]
    return TrainingRun(
        source=escape(folder),
        config=config,
        status=_status(folder, len(validated), config.optimizer.schedule.epochs),
        environment=environment,
        epochs=validated,
        reconstruction=_evenly_spread(reconstructions, NUM_RECONSTRUCTIONS),
        angles=_evenly_spread(angles, NUM_ANGLES),
        num_training_images=num_trained,
        num_validation_images=num_scored,
        data=data,
        cost=_cost(records),
    )


def _cost(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the cost of all processes that wrote these records, one after another; None if one is not known."""
    starts = [index for index, record in enumerate(records) if record["event"] in ("start", "resume")]
    costs = []
    for start, stop in zip(starts, [*starts[1:], len(records)], strict=True):
        first, last = records[start], records[stop - 1]
        if last["event"] != "end" and not {"time_s", "world_size", "environment"} <= first.keys():
            return None
        costs.append(last if last["event"] == "end" else _cost_until(last, first))
    return total_cost(costs) if costs else None


def _cost_until(last: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of a process that was killed after its ``last`` record."""
    seconds = last["time_s"] - first["time_s"]
    on_gpu = first["environment"].get("cuda") is not None
    return {"seconds": seconds, "gpu_seconds": seconds * first["world_size"] if on_gpu else None}


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log, after checking that they have the `REQUIRED_KEYS`."""
    try:
        records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for record in records:
            for key in REQUIRED_KEYS.get(record["event"], ()):
                record[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the metrics of a training run cannot be read ({error})",
            f"--runs {path}",
            "give folders that `zoo train --log-dir` wrote, or PAPER_runs.json files that `zoo reproduce` wrote",
        ) from error
    return records


def _evenly_spread(records: Mapping[int, dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return at most ``most`` evenly spaced records in order of their steps, including the first and the last."""
    steps, count = sorted(records), min(len(records), most)
    return [records[steps[round(index * (len(steps) - 1) / max(1, count - 1))]] for index in range(count)]


def _status(folder: Path, num_done: int, num_epochs: int) -> str:
    if num_done == num_epochs:
        return "finished"
    log = folder / TEXT_LOG
    stops = re.findall(r"stopped: .*", log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    return stops[-1] if stops else f"{num_done} of {num_epochs} epochs"


def _read_file(path: Path) -> list[TrainingRun]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [_from_json(path, run) for run in content["runs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"training runs cannot be read ({type(error).__name__}: {error})",
            f"--runs {path}",
            "give log folders of `zoo train`, or PAPER_runs.json files that `zoo reproduce` wrote",
        ) from error


def _from_json(path: Path, run: dict[str, Any]) -> TrainingRun:
    """Return a run of a file."""
    source = f"{escape(path)}: {escape(run['label'])}, seed {int(run['seed'])}"
    for epoch in run["epochs"]:
        float(epoch["val_top1"]), int(epoch["epoch"])
    counts = (run.get(key) for key in ("num_training_images", "num_validation_images"))
    num_training_images, num_validation_images = (None if count is None else int(count) for count in counts)
    return TrainingRun(
        source=source,
        config=parse_experiment(run["settings"], source),
        status=str(run.get("status", "unknown")),
        environment=run.get("environment"),
        epochs=list(run["epochs"]),
        reconstruction=list(run.get("reconstruction", ())),
        angles=list(run.get("angles", ())),
        num_training_images=num_training_images,
        num_validation_images=num_validation_images,
        data=str(run.get("data", "")),
        cost=run.get("cost"),
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


def data_of(runs: Sequence[TrainingRun]) -> str:
    """Return the digests of the images of all runs; empty if they differ or were not recorded."""
    digests = {run.data for run in runs}
    return digests.pop() if len(digests) == 1 else ""


def write_runs(folder: Path, name: str, command: str, runs: Sequence[TrainingRun]) -> None:
    """Write NAME_runs.json, which can be given instead of the runs' log folders."""
    costs = [run.cost for run in runs if run.cost is not None]
    content = {
        "benchmark": f"{name} runs",
        "command": command,
        "environment": describe_environment(torch.device("cpu")),
        "cost": total_cost(costs) if len(costs) == len(runs) else None,
        "runs": [run.to_json() for run in runs],
    }
    write_json(folder / f"{name}_runs.json", content)


def draw_runs(folder: Path, name: str, runs: Sequence[TrainingRun]) -> None:
    """Plot the runs (at least one) to NAME_runs.png; needs matplotlib."""
    title = f"Training runs given to zoo reproduce {name}"
    panels = [panel for group in groups_of(runs) for panel in _panels(group)]
    write_bytes(folder / f"{name}_runs.png", draw_panels(title, panels))


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
        top1.append(run.line([epoch["epoch"] for epoch in run.epochs], run.top1, run.stop_reason))
        recorded = [epoch for epoch in run.epochs if epoch.get("train_loss") is not None]
        if recorded:
            values = [float(epoch["train_loss"]) for epoch in recorded]
            losses.append(run.line([epoch["epoch"] for epoch in recorded], values))
    title = ", ".join(dict.fromkeys(run.config.network.arch for run in runs))
    panels = [Panel(title, "epoch", "top-1 on the validation images, %", top1)]
    return panels + [Panel(title, "epoch", "training loss, mean of the epoch", losses)] * bool(losses)
