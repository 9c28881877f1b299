"""The names of a network's classes, and class folders that are matched to its outputs by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data.sample_images import make_folder, random_image
from zoo.data.classes import class_names, match_classes
from zoo.data.dataset import ImageFolder
from zoo.data.imagenet import imagenet_wnids
from zoo.data.transforms.classification import ValTransform

PLAIN = ValTransform(-1, 8, [0.5] * 3, [0.5] * 3)


def test_names_of_weights_file_win_and_wnids_become_words() -> None:
    assert class_names(3, known=("cat", "dog")) == ["cat", "dog", "2"]
    assert class_names(1000, known=imagenet_wnids())[281] == "tabby"
    assert class_names(1000, known=["x"] * 1000) == ["x"] * 1000


SUBSET = {"n02099601": 207, "n02123045": 281, "n04285008": 817}


def _folder(root: Path, names: Sequence[str]) -> ImageFolder:
    return ImageFolder(make_folder(root, dict.fromkeys(names, 1)), PLAIN)


def _targets(images: ImageFolder) -> dict[str, int]:
    """Return the target that the images of each class folder have."""
    return {Path(sample.path).parent.name: sample.target for sample in (images[0, i] for i in range(len(images)))}


@pytest.mark.parametrize(
    ("names", "num_outputs", "expected"),
    [
        (None, 1000, SUBSET),
        (imagenet_wnids(), 1000, SUBSET),
        (["a", "b", "c", "d", "e"], 5, {"c": 2, "e": 4}),
    ],
)
def test_folders_are_matched_to_outputs_by_name(
    names: Sequence[str] | None, num_outputs: int, expected: dict[str, int], tmp_path: Path, caplog: Any
) -> None:
    images = _folder(tmp_path, list(expected))
    match_classes(images, num_outputs, names)
    assert _targets(images) == expected
    matched = f"matched by name to {len(expected)} of the network's {num_outputs} outputs"
    assert matched in caplog.text


def test_numbered_folders_of_imagenet_v2_are_classes(tmp_path: Path) -> None:
    """Their sorted order is 0, 1, 10, 100, so folder 2 has index 112."""
    for number in range(1000):
        (tmp_path / str(number)).mkdir()
    for number in (2, 10, 999):
        random_image(number).save(tmp_path / str(number) / "image.png")
    for names in (None, imagenet_wnids()):
        images = ImageFolder(tmp_path, PLAIN, allow_empty_classes=True)
        match_classes(images, 1000, names)
        assert _targets(images) == {"2": 2, "10": 10, "999": 999}


def test_without_names_folders_are_numbered_in_order_with_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = _folder(tmp_path, ["x", "y"])
    with caplog.at_level(logging.INFO):
        match_classes(images, 2, None)
    assert _targets(images) == {"x": 0, "y": 1}
    assert "the class folders in sorted order (x, y)" in caplog.text
