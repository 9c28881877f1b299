"""The bundled scenes have garments of one class and right label maps, and their folder has the layout of a data set."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.data.prepare import scenes as module
from zoo.data.prepare.sample import ARCHIVE, CLASSES
from zoo.data.prepare.scenes import GARMENTS_DIR, SCENE_CLASSES, scenes, single_garments, unpack_scenes
from zoo.data.segmentation.label_maps import labeled_images, read_pair

FEW = {"train": 5, "val": 3}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_SCENES", FEW)
    monkeypatch.setattr(module, "NUM_GARMENTS", FEW)


def test_garments_are_of_one_class_and_brighter_than_ground() -> None:
    for index, (image, classes) in enumerate(islice(scenes("val"), 20)):
        assert set(np.unique(classes)) == {0, index % len(CLASSES) + 1}
        assert image[classes == 0].max() <= module.MAX_GROUND_VALUE
        assert image[classes > 0].min() >= module.MIN_GARMENT_VALUE * module.MIN_COLOR_VALUE // 255


@pytest.mark.usefixtures("few")
def test_folder_has_images_and_label_maps_in_layout_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    tree = unpack_scenes()
    for split, count in FEW.items():
        found = labeled_images(tree, split, "folders", 11, 255)
        assert (len(found.images), tuple(found.classes)) == (count, SCENE_CLASSES)
        for image, label, scene in zip(found.images, found.labels, scenes(split), strict=True):
            pixels, classes = read_pair(tree / image, tree / label, found.table)
            assert np.array_equal(np.asarray(pixels), scene.image)
            assert np.array_equal(classes, scene.classes)
        for number, name in enumerate(CLASSES):
            files = sorted((tree / GARMENTS_DIR / split / name).iterdir())
            expected = [image for of_class, image in single_garments(split) if of_class == number]
            assert len(files) == count
            for file, image in zip(files, expected, strict=True):
                with Image.open(file) as read:
                    assert np.array_equal(np.asarray(read), image)
    assert "Zalando" in (tree / "LICENSE.fashion-mnist.txt").read_text()


def test_validation_scenes_are_made_of_validation_images_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {split: list(islice(scenes(split), 2)) for split in FEW}
    with np.load(ARCHIVE, allow_pickle=False) as archive:
        np.savez(tmp_path / "x.npz", train=255 - archive["train"], val=archive["val"])
    monkeypatch.setattr(module, "ARCHIVE", tmp_path / "x.npz")
    after = {split: list(islice(scenes(split), 2)) for split in FEW}
    assert all(np.array_equal(a.image, b.image) for a, b in zip(before["val"], after["val"], strict=True))
    assert not any(np.array_equal(a.image, b.image) for a, b in zip(before["train"], after["train"], strict=True))


def test_silhouette_includes_only_inner_dark_pixels() -> None:
    garment = np.zeros((28, 28), np.uint8)
    garment[4:24, 6:20] = 200
    garment[10:14, 10:14] = 0  # a hole
    garment[16:18, 15:20] = 0  # a hole
    expected = np.zeros((28, 28), np.uint8)
    expected[4:24, 6:20] = 255
    expected[16:18, 15:20] = 0
    assert np.array_equal(np.asarray(module._silhouette(garment)), expected)
