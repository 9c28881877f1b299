"""Files of segmented images hold the classes as they are, in the colors of their palette, and legends can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.run.label_images import Palette, id_image, palette_for, palette_image, write_png, write_probabilities

CLASSES = np.array([[0, 1, 2], [64, 2, 2]])


THREE = Palette(np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=np.uint8), ["red", "green", "blue"])


def test_a_palette_png_has_the_classes_as_values_and_shows_the_published_colors(tmp_path: Path) -> None:
    write_png(tmp_path / "new" / "a.png", palette_image(CLASSES, palette_for(65, layout="vistas")))
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert image.mode == "P"
        assert np.array_equal(np.asarray(image), CLASSES)
        shown = np.asarray(image.convert("RGB"))
        rest = image.getpalette("RGB")[3 * 65 :]
    assert shown[0, 0].tolist() == [0xA5, 0x2A, 0x2A]  # bird
    assert shown[1, 0].tolist() == [0x78, 0x0A, 0x0A]  # ego vehicle
    assert not any(rest)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]


@pytest.mark.parametrize(("num_classes", "mode"), [(65, "L"), (256, "L"), (257, "I;16"), (65536, "I;16")])
def test_ids_take_16_bits_where_8_do_not_suffice(tmp_path: Path, num_classes: int, mode: str) -> None:
    classes = np.array([[0, num_classes - 1]])
    write_png(tmp_path / "a.png", id_image(classes, num_classes))
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == mode
        assert np.array_equal(np.asarray(image), classes)


@pytest.mark.parametrize(("num_classes", "dtype"), [(65, np.uint8), (300, np.uint16), (70000, np.uint32)])
def test_probabilities_are_written_with_their_classes(tmp_path: Path, num_classes: int, dtype: type) -> None:
    probabilities = np.array([[0.5, 1.0, 0.25], [0.1, 0.9999, 0.3]], dtype=np.float32)
    for name in ("a.npz", "b.npz"):
        write_probabilities(tmp_path / name, CLASSES, probabilities, num_classes)
    with np.load(tmp_path / "a.npz") as content:
        assert set(content.files) == {"classes", "probability"}
        assert content["classes"].dtype == dtype
        assert np.array_equal(content["classes"], CLASSES)
        assert content["probability"].dtype == np.float16
        np.testing.assert_allclose(content["probability"], probabilities, atol=2**-11)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
