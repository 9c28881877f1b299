"""The labels of ImageNet-ReaL go by the numbers of the images, and anything that is not them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
    ("content", "message"),
    [
        ({}, "not the labels of ImageNet-ReaL: Input should be a valid array"),
        ([[1], [1000], [3]], "less than 1000"),
        ([[1]], "labels of 1 images, not of the 3"),
    ],
)
def test_nonconforming_file_raises_with_its_first_fault(content: Any, message: str, tmp_path: Path) -> None:
    path = _file(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        read_real_labels(path)
    assert str(path) in str(caught.value)
    assert "reassessed-imagenet" in str(caught.value)


def test_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: .*No such file.*; give real.json"):
        read_real_labels(tmp_path / "none.json")


UNKNOWN = "is not an image of ImageNet's validation set"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("n01440764/cat.JPEG", f"cat.JPEG {UNKNOWN}"),
        ("n01440764/ILSVRC2012_val_00000004.JPEG", f"00000004.JPEG {UNKNOWN}"),
        ("n01440764/ILSVRC2012_val_00000000.JPEG", f"00000000.JPEG {UNKNOWN}"),
        ("n01443537/ILSVRC2012_val_00000001.JPEG", "was scored as class 0, but n01443537 is class 1 of ImageNet"),
    ],
)
def test_unknown_images_and_other_class_orders_raise(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        real_labels_of({f"val/{path}": 0}, [frozenset()] * 3)
