"""Writes confusion matrices, with the scores of each class, as JSON, CSV or a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zoo.engine._task import Result
from zoo.errors import ConfigError, escape
from zoo.files import write_json, write_text
from zoo.memory.plot import BLUE, draw_figure, format_of, save
from zoo.tasks.confusion import ConfusionMatrix
from zoo.tasks.segmentation import SegmentationResult

MAX_NAMES, MAX_NUMBERS = 60, 15  # a picture of more classes has no names, or no numbers
HEIGHT = 6.2  # height of a picture, inches


def check_matrix_file(path: Path) -> None:
    """Raise ConfigError unless `write_matrix` can write a file of this suffix."""
    if path.suffix.lower() not in (".json", ".csv"):
        format_of(path)


def write_matrix(path: Path, result: Result, names: Sequence[str], title: str) -> None:
    """Write the confusion matrix of a result to ``path``, in the format of its suffix.

    JSON and CSV have the number of images or pixels of each class, its recall, precision and F1 in percent, and the
    matrix: rows are labels, columns predictions. A picture shows the shares of each row.

    Args:
    - `names`: names of the classes, in the order of their numbers.
    - `title`: name of the network.

    Raises ConfigError for another suffix, for a result without a matrix, and for a picture without matplotlib.
    """
    check_matrix_file(path)
    counts: list[list[int]] | None = getattr(result, "confusion", None)
    if counts is None:
        raise ConfigError("this result has no confusion matrix", title, "score the network with zoo.score")
    matrix = ConfusionMatrix(torch.tensor(counts))
    unit = "pixels" if isinstance(result, SegmentationResult) else "images"
    columns = (names, map(sum, counts), matrix.class_accuracy, matrix.precision, matrix.f1)
    rows = [
        dict(zip(("name", unit, "recall", "precision", "f1"), row, strict=True)) for row in zip(*columns, strict=True)
    ]
    if path.suffix.lower() == ".json":
        head = {"network": title, "protocol": result.protocol, "unit": unit}
        write_json(path, {**head, "classes": rows, "matrix": counts})
    elif path.suffix.lower() == ".csv":
        write_text(path, _as_csv(rows, counts))
    else:
        _draw(path, matrix, names, f"{title}, {result.protocol}: {result.count:,} images")


def _as_csv(rows: Sequence[dict[str, Any]], counts: Sequence[Sequence[int]]) -> str:
    """Return a table with a row per class: its scores, then the number of its predictions of each class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*rows[0], *(f"predicted {row['name']}" for row in rows)])
    for row, of_class in zip(rows, counts, strict=True):
        scores = [f"{value:.4f}" if isinstance(value, float) else value for value in row.values()]
        writer.writerow([*scores, *of_class])
    return text.getvalue()


def _draw(path: Path, matrix: ConfusionMatrix, names: Sequence[str], title: str) -> None:
    shares = matrix.counts / matrix.counts.sum(1, keepdim=True).clamp(min=1)
    with draw_figure("--confusion", HEIGHT) as figure:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.add_subplot()
        colors = LinearSegmentedColormap.from_list("shares", ["#FFFFFF", BLUE, "#0B2A45"])
        image = axes.imshow(shares.numpy(), cmap=colors, vmin=0, vmax=1, aspect="equal")
        figure.colorbar(image, label="share of the label")
        if len(names) <= MAX_NAMES:
            places, shown = range(len(names)), [escape(name) for name in names]
            axes.set_xticks(places, shown, rotation=90)
            axes.set_yticks(places, shown)
        if len(names) <= MAX_NUMBERS:
            for label, row in enumerate(matrix.counts.tolist()):
                for predicted, count in enumerate(row):
                    color = "white" if shares[label, predicted] > 0.4 else "black"
                    axes.text(predicted, label, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
        axes.set_xlabel("predicted")
        axes.set_ylabel("label")
        axes.set_title(title)
    save(figure, path)
