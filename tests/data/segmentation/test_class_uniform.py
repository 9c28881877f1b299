"""Classes are drawn uniformly, then images, then pixels; the index of classes is read once."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.data.sample_labels import IGNORE, label_map, make_labeled
from zoo.data.segmentation import class_uniform
from zoo.data.segmentation.class_uniform import ClassUniform, draw_pixel, load_class_index
from zoo.data.segmentation.label_maps import LabeledImages, labeled_images, read_label


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def found(tmp_path: Path) -> LabeledImages:
    """Five images: class 0 in all, class 1 in two, class 2 in one, class 3 in none."""
    data = make_labeled(tmp_path / "data", 5, 1)
    found = labeled_images(data, "train", "folders", 4, IGNORE)
    for index, label in enumerate(found.labels):
        classes = np.zeros((10, 12), dtype=np.uint8)
        classes[0] = IGNORE
        classes[2, 3] = 1 if index < 2 else 0
        classes[4, 5] = 2 if index == 3 else 0
        label_map(classes).save(data / label)
    return found


INDEX = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("workers", [0, 3])
def test_index_maps_classes_to_images(found: LabeledImages, workers: int) -> None:
    index = load_class_index(found, workers=workers)
    assert (index.dtype, index.tolist()) == (bool, [list(map(bool, row)) for row in INDEX])


def test_index_is_read_once_and_again_when_label_map_changes(
    found: LabeledImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    monkeypatch.setattr(
        class_uniform, "read_label", lambda path, table: reads.append(path.name) or read_label(path, table)
    )
    first = load_class_index(found)
    assert np.array_equal(load_class_index(found), first)
    assert len(reads) == 5
    os.utime(found.root / found.labels[0], ns=(1, 1))
    load_class_index(found)
    assert len(reads) == 10


def test_classes_are_drawn_uniformly_before_images(found: LabeledImages, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        uniform = ClassUniform(found, np.array(INDEX, dtype=bool))
    assert "1 of 4 classes are in no training image and are not drawn: 3;" in caplog.text
    generator = Random(0)
    draws = [uniform.draw(generator) for _ in range(3000)]
    assert all(INDEX[image][number] for number, image in draws)
    counts = Counter(number for number, _ in draws)
    assert all(900 < counts[number] < 1100 for number in range(3))
    images = Counter(image for number, image in draws if number == 0)
    assert all(150 < images[image] < 250 for image in range(5))


def test_pixels_of_class_are_drawn_uniformly() -> None:
    classes = np.array([[0, 1, 0], [1, 0, IGNORE]])
    generator = Random(0)
    counts = Counter(draw_pixel(classes, 1, generator) for _ in range(400))
    assert set(counts) == {(0, 1), (1, 0)}
    assert min(counts.values()) > 150
    assert draw_pixel(classes, 2, generator) is None
