"""Draws the curves of training runs from their metrics: `plot_runs`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import ConfigError, escape
from zoo.memory.plot import BLUE, GRAY, ORANGE, draw_figure, format_of, save
from zoo.run.log_folder import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]

COLORS = (BLUE, ORANGE, "#0E8F66", "#C8609F", "#8A6BD8", "#97770A", "#178A9A")  # readable on white and on dark pages
SCORES = {"top1": "top-1", "miou": "mIoU"}  # the score that selects the best epoch, and its label
HEIGHT = 5.2  # inches


def plot_runs(
    runs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], path: str | os.PathLike[str] | None = None
) -> Figure:
    """Return a plot of the losses and the scores of training runs over epochs, from their ``metrics.jsonl``.

    Thin lines are training, averaged over each log interval. Thick lines with a marker per epoch are validation. If a
    resumed run repeated steps, their last records count. A notebook shows the figure. With a ``path``, writes it in the
    format of the suffix, such as .png or .pdf.

    Args:
    - `runs`: log folders of `zoo.train`; one, or several.
    - `path`: the file to write.

    Raises ConfigError for a folder without metrics, for an unknown suffix, and without matplotlib.
    """
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if path is not None:
        format_of(Path(path))
    records = {os.fspath(folder): _records(Path(folder)) for folder in folders}
    with draw_figure("zoo plot", HEIGHT) as figure:
        loss_axes, score_axes = figure.subplots(2, 1, sharex=True)
        labels = set()
        for number, (name, of_run) in enumerate(records.items()):
            color, style = COLORS[number % len(COLORS)], ("-", ":")[number // len(COLORS) % 2]
            score = next(key for key in SCORES if any(key in record for record in of_run))
            labels.add(SCORES[score])
            for axes, key in ((loss_axes, "loss"), (score_axes, score)):
                train, val = _curve(of_run, "train", key), _curve(of_run, "validation", key)
                axes.plot(*_columns(train), style, color=color, linewidth=0.7, alpha=0.7)
                axes.plot(*_columns(val), style, color=color, linewidth=1.6, marker="o", markersize=3, label=name)
        loss_axes.set_ylabel("loss, nats")
        score_axes.set_ylabel(f"{' or '.join(sorted(labels))}, %")
        score_axes.set_xlabel("epoch")
        loss_axes.plot([], [], color=GRAY, linewidth=0.7, label="training")
        loss_axes.plot([], [], color=GRAY, linewidth=1.6, marker="o", markersize=3, label="validation")
        figure.legend(*loss_axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        for axes in (loss_axes, score_axes):
            axes.grid(visible=True)
    if path is not None:
        save(figure, Path(path))
    return figure


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of training and validation; ConfigError without any."""
    path = folder / METRICS_FILE
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [record for record in records if record["event"] in ("train", "validation")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {escape(error)}"
        raise ConfigError(
            f"the metrics of a run cannot be read ({reason})", path, "give log folders of runs"
        ) from error
    if not any(key in record for record in found for key in SCORES):
        raise ConfigError("the run has no metrics yet", path, "wait for its first log line")
    return found


def _curve(records: Iterable[Mapping[str, Any]], event: str, key: str) -> list[Point]:
    """Return the points (epoch, value) of an event in order, without non-finite values."""
    points: dict[float, float] = {}
    for record in records:
        if record["event"] == event:
            batches = record.get("num_batches")
            epoch = record["epoch"] + (1 if batches is None else record["batch"] / batches)
            points.pop(epoch, None)
            if record.get(key) is not None:
                points[epoch] = record[key]
    return sorted(points.items())


def _columns(points: list[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
