"""Predictions as text: a CSV line per image, so that two runs can be compared image by image."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from zoo.engine.predict import Prediction
from zoo.files import write_text


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write the header and a line per image, sorted by path, whole or not at all.

    Columns: path, target, class1 to class5, probability1 to probability5 (0 to 1, six decimals: more would only show
    the order in which a device adds). Fewer where the network has fewer classes.
    """
    lines = sorted(predictions, key=lambda prediction: prediction.path)
    places = range(1, 1 + max((len(line.classes) for line in lines), default=0))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "target", *(f"class{n}" for n in places), *(f"probability{n}" for n in places)])
    for line in lines:
        writer.writerow([line.path, line.target, *line.classes, *(f"{value:.6f}" for value in line.probabilities)])
    write_text(path, text.getvalue())
