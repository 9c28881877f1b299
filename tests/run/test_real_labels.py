"""The labels of ImageNet-ReaL go by the numbers of the images, and anything that is not them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from zoo.errors import DataError
from zoo.run.real_labels import read_real_labels, real_labels_of

LABELS = [[1], [], [3, 4]]


@pytest.fixture(autouse=True)
def _three_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three images count as all of ImageNet's validation set."""
    monkeypatch.setattr("zoo.run.real_labels.NUM_VAL_IMAGES", len(LABELS))


def _file(folder: Path, content: Any) -> Path:
    (folder / "real.json").write_text(json.dumps(content))
    return folder / "real.json"


def test_first_entry_belongs_to_image_with_number_one(tmp_path: Path) -> None:
    labels = read_real_labels(_file(tmp_path, LABELS))
    third, second = "val/n01443537/ILSVRC2012_val_00000003.JPEG", "val/goldfish/ILSVRC2012_val_00000002.png"
    assert real_labels_of({third: 1, second: 7}, labels) == {third: {3, 4}, second: frozenset()}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({}, ["valid array"]),
        ([[1], [1000], [3]], ["less than 1000"]),
        ([[1]], ["1 images", "the 3"]),
        (None, ["No such file"]),
    ],
)
def test_unusable_file_raises(content: Any, names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "real.json" if content is None else _file(tmp_path, content)
    refused(DataError, lambda: read_real_labels(path), f"{path}: ", "reassessed-imagenet", *names)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("n01440764/cat.JPEG", ["cat.JPEG"]),
        ("n01440764/ILSVRC2012_val_00000004.JPEG", ["00000004.JPEG"]),
        ("n01440764/ILSVRC2012_val_00000000.JPEG", ["00000000.JPEG"]),
        ("n01443537/ILSVRC2012_val_00000001.JPEG", ["class 0", "n01443537 is class 1"]),
    ],
)
def test_unknown_images_and_other_class_orders_raise(path: str, names: list[str]) -> None:
    refused(DataError, lambda: real_labels_of({f"val/{path}": 0}, [frozenset()] * 3), *names)
