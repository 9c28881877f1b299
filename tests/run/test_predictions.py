"""Files of predictions do not depend on the order of the images, and the grid shows every image whole."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.run.predictions import LINE_PX, MARGIN_PX, TILE_PX, image_grid, write_grid, write_predictions
from zoo.tasks.prediction import Prediction

LEFT, STEP = MARGIN_PX, MARGIN_PX + TILE_PX
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


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (5, 3, 2), (40, 6, 7)])
def test_images_stand_in_rows_and_columns(count: int, columns: int, rows: int) -> None:
    sheet = image_grid([(Image.new("RGB", (4, 4), "red"), ["text"])] * count)
    assert sheet.size == (columns * STEP + MARGIN_PX, rows * (TILE_PX + LINE_PX + 2 * MARGIN_PX) + MARGIN_PX)


@pytest.mark.parametrize("size", [(4, 4), (1000, 1000)])
def test_an_image_fills_its_tile_at_any_size(size: tuple[int, int]) -> None:
    pixels = np.asarray(image_grid([(Image.new("RGB", size, "red"), [])]))
    assert (pixels[MARGIN_PX : MARGIN_PX + TILE_PX, LEFT : LEFT + TILE_PX] == (255, 0, 0)).all()


def test_an_oblong_image_is_shown_whole() -> None:
    pixels = np.asarray(image_grid([(Image.new("RGB", (400, 100), "red"), [])]))
    assert (pixels == (255, 0, 0)).all(axis=2).sum() == TILE_PX * TILE_PX // 4


def test_long_lines_are_cut_and_unknown_signs_replaced() -> None:
    blank = Image.new("RGB", (4, 4), "white")
    pixels = np.asarray(image_grid([(blank, ["\u4e2d\udcff wide " * 30]), (blank, [])]))
    below = pixels[MARGIN_PX + TILE_PX :]
    assert (below[:, :STEP] < 128).any()
    assert (below[:, STEP:] == 255).all()


def test_the_file_is_a_png(tmp_path: Path) -> None:
    write_grid(tmp_path / "grid.png", [(Image.new("L", (4, 4)), ["text"])])
    with Image.open(tmp_path / "grid.png") as image:
        assert image.format == "PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]
