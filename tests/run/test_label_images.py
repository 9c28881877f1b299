"""Files of segmented images have classes as pixel values and display palette colors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.errors import ConfigError
from zoo.run.label_images import KINDS, colors_of
from zoo.tasks.tta import Segments

CLASSES = np.array([[0, 1, 2], [64, 2, 2]])
PROBABILITIES = np.array([[0.5, 1.0, 0.25], [0.1, 0.9999, 0.3]], dtype=np.float32)


def _write(kind: str, path: Path, classes: np.ndarray, num_classes: int) -> None:
    segments = Segments(torch.from_numpy(classes.astype(np.int32)), torch.from_numpy(PROBABILITIES))
    network = {"arch": "deeplab_resnet18", "num_classes": num_classes}
    config = parse_experiment({"network": network, "segmentation": {"layout": "vistas", "ignore_label": 65535}}, "test")
    KINDS[kind].write(path, Image.new("RGB", (3, 2)), segments, colors_of(config))


def test_palette_png_has_class_values_and_published_colors(tmp_path: Path) -> None:
    _write("palette", tmp_path / "new" / "a.png", CLASSES, 65)
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert image.mode == "P"
        assert np.array_equal(np.asarray(image), CLASSES)
        shown = np.asarray(image.convert("RGB"))
        rest = image.getpalette("RGB")[3 * 65 :]
    assert shown[0, 0].tolist() == [0xA5, 0x2A, 0x2A]  # bird
    assert shown[1, 0].tolist() == [0x78, 0x0A, 0x0A]  # ego vehicle
    assert not any(rest)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]
    refused(ConfigError, lambda: _write("palette", tmp_path / "a.png", CLASSES, 300), "300 classes")


@pytest.mark.parametrize(("num_classes", "mode"), [(256, "L"), (257, "I;16")])
def test_ids_take_16_bits_where_8_do_not_suffice(tmp_path: Path, num_classes: int, mode: str) -> None:
    classes = np.array([[0, num_classes - 1]])
    _write("ids", tmp_path / "a.png", classes, num_classes)
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == mode
        assert np.array_equal(np.asarray(image), classes)


def test_probabilities_are_written_with_their_classes(tmp_path: Path) -> None:
    _write("prob", tmp_path / "a.npz", CLASSES, 65)
    with np.load(tmp_path / "a.npz") as content:
        assert set(content.files) == {"classes", "probability"}
        assert np.array_equal(content["classes"], CLASSES)
        np.testing.assert_allclose(content["probability"], PROBABILITIES, atol=2**-11)


def test_other_classes_have_colors_of_pascal_voc() -> None:
    network = {"arch": "deeplab_resnet18", "num_classes": 256}
    config = parse_experiment({"network": network, "segmentation": {"ignore_label": 65535}}, "test")
    colors = colors_of(config)
    assert colors[[0, 1, 2, 15, 20]].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128]]
    assert len(np.unique(colors, axis=0)) == 256
