"""Prediction files: a CSV line per image."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from zoo.files import write_text
from zoo.tasks.prediction import Prediction


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write a CSV file with a header and a line per image, sorted by path.

    Columns: path, target, class1 to class5, probability1 to probability5; fewer if the network has fewer classes.
    Probabilities (0 to 1) have six decimals; further digits depend on the device's order of summation. The file is
    written atomically.
    """
    lines = sorted(predictions, key=lambda prediction: prediction.path)
    places = range(1, 1 + max((len(line.classes) for line in lines), default=0))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "target", *(f"class{n}" for n in places), *(f"probability{n}" for n in places)])
    for line in lines:
        writer.writerow([line.path, line.target, *line.classes, *(f"{value:.6f}" for value in line.probabilities)])
    write_text(path, text.getvalue())
