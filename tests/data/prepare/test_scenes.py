"""The bundled scenes are the same everywhere, their label maps are right, and their folder is complete or not there."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from zoo.data.label_maps import labeled_images, read_pair
from zoo.data.prepare import scenes as module
from zoo.data.prepare.sample import ARCHIVE, CLASSES
from zoo.data.prepare.scenes import (
    GARMENTS_DIR,
    PALETTE,
    SCENE_CLASSES,
    SIDE_PX,
    scenes,
    single_garments,
    unpack_scenes,
)
from zoo.errors import VerificationError

FEW = {"train": 5, "val": 3}
PIXELS_OF_FEW = "2a0c2ce14a8f2b7628e5152bcc76deb6f9e24aa0e5088ba9e3ea0695cbfae43d"


def _digest(counts: dict[str, int]) -> str:
    digest = hashlib.sha256()
    for split, count in counts.items():
        for image, classes in islice(scenes(split), count):
            digest.update(image.tobytes() + classes.tobytes())
        for _, image in single_garments(split):
            digest.update(image.tobytes())
    return digest.hexdigest()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_SCENES", FEW)
    monkeypatch.setattr(module, "NUM_GARMENTS", FEW)
    monkeypatch.setattr(module, "PIXELS_SHA256", PIXELS_OF_FEW)


@pytest.mark.usefixtures("few")
def test_the_first_scenes_have_the_pixels_that_they_had() -> None:
    assert _digest(FEW) == PIXELS_OF_FEW


def test_the_garments_of_a_scene_are_of_one_class_and_all_classes_take_turns() -> None:
    for index, (_, classes) in enumerate(islice(scenes("val"), 20)):
        assert set(np.unique(classes)) == {0, index % len(CLASSES) + 1}


@pytest.mark.usefixtures("few")
def test_the_folder_has_images_and_palette_label_maps_in_the_layout_of_folders(tmp_path: Path) -> None:
    tree = unpack_scenes(tmp_path)
    for split, count in FEW.items():
        found = labeled_images(tree, split, "folders", 11, 255)
        assert (len(found.images), tuple(found.classes)) == (count, SCENE_CLASSES)
        for image, label, scene in zip(found.images, found.labels, scenes(split), strict=True):
            pixels, classes = read_pair(tree / image, tree / label, found.table)
            assert np.array_equal(np.asarray(pixels), scene.image)
            assert np.array_equal(classes, scene.classes)
    with Image.open(tree / "train" / "labels" / "0000.png") as label_map:
        assert label_map.mode == "P"
        assert label_map.getpalette()[: 3 * len(PALETTE)] == [value for color in PALETTE for value in color]
        for number, name in enumerate(CLASSES):
            files = sorted((tree / GARMENTS_DIR / split / name).iterdir())
            expected = [image for of_class, image in single_garments(split) if of_class == number]
            assert len(files) == count
            for file, image in zip(files, expected, strict=True):
                with Image.open(file) as read:
                    assert np.array_equal(np.asarray(read), image)
    assert "Zalando" in (tree / "LICENSE.fashion-mnist.txt").read_text()


@pytest.mark.usefixtures("few")
def test_other_pixels_are_noticed_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_GARMENT_VALUE", module.MIN_GARMENT_VALUE + 1)
    with pytest.raises(VerificationError, match="the pixels of the scenes are wrong"):
        unpack_scenes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_validation_scenes_are_made_of_validation_images_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {split: list(islice(scenes(split), 2)) for split in FEW}
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        np.savez(tmp_path / "x.npz", train=255 - archive["train"], val=archive["val"])
    monkeypatch.setattr(module, "ARCHIVE", tmp_path / "x.npz")
    after = {split: list(islice(scenes(split), 2)) for split in FEW}
    assert all(np.array_equal(a.image, b.image) for a, b in zip(before["val"], after["val"], strict=True))
    assert not any(np.array_equal(a.image, b.image) for a, b in zip(before["train"], after["train"], strict=True))


def test_a_later_garment_hides_an_earlier_one_and_nothing_else() -> None:
    square = np.full((28, 28), 200, dtype=np.uint8)
    square[:2] = square[-2:] = 0
    silhouette = module._silhouette(square)
    image, classes = np.zeros((SIDE_PX, SIDE_PX, 3), dtype=np.int64), np.zeros((SIDE_PX, SIDE_PX), dtype=np.uint8)
    red, blue = np.array([255, 0, 0]), np.array([0, 0, 255])
    module._paint(image, classes, square, silhouette, 3, 28, 10, 10, red)
    module._paint(image, classes, square, silhouette, 5, 28, 20, -6, blue)
    expected = np.zeros_like(classes)
    expected[12:36, 10:38] = 3
    expected[22:46, :22] = 5
    assert np.array_equal(classes, expected)
    assert np.array_equal(image[..., 0] > 0, expected == 3)
    assert np.array_equal(image[..., 2] > 0, expected == 5)


def test_a_silhouette_is_all_that_dark_pixels_do_not_connect_with_the_border() -> None:
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        garments = archive["val"][:, 0]
    for garment in garments:
        outside, front = set(), [(-1, -1)]
        while front:  # a flood fill, one pixel after the other
            row, column = front.pop()
            within = 0 <= row < 28 and 0 <= column < 28
            if (row, column) in outside or not (-1 <= row <= 28 and -1 <= column <= 28):
                continue
            if within and garment[row, column] > module.SILHOUETTE_THRESHOLD:
                continue
            outside.add((row, column))
            front += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        expected = [[int((row, column) not in outside) for column in range(28)] for row in range(28)]
        assert module._silhouette(garment).tolist() == expected


@pytest.mark.parametrize("side", [28, 31, 48, 96])
def test_whole_numbers_are_interpolated_as_by_torch(side: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (28, 28))
    expected = interpolate(torch.from_numpy(image)[None, None].double(), (side, side), mode="bilinear")[0, 0].numpy()
    difference = expected - module._scaled(image, side)
    assert -1e-9 <= difference.min() <= difference.max() < 1
