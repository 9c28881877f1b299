"""Files of predictions do not depend on the order of the images."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from zoo.run.predictions import write_predictions
from zoo.tasks.prediction import Prediction

A = Prediction("val/a/1.png", 0, (1, 0), (0.75, 0.25))
B = Prediction('val/b/"x", 2.png', 1, (1, 0), (0.9999999, 0.0000001))


def test_lines_are_sorted_by_path_and_complete(tmp_path: Path) -> None:
    write_predictions(tmp_path / "1.csv", [B, A])
    write_predictions(tmp_path / "2.csv", [A, B])
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    with (tmp_path / "1.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["path", "target", "class1", "class2", "probability1", "probability2"],
        ["val/a/1.png", "0", "1", "0", "0.750000", "0.250000"],
        ['val/b/"x", 2.png', "1", "1", "0", "1.000000", "0.000000"],
    ]


def test_names_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p.csv", [A._replace(path=os.fsdecode(b"val/\xff.png"))])
    assert b"val/\xff.png,0," in (tmp_path / "p.csv").read_bytes()
