"""Every kind of image becomes 8-bit RGB as a viewer would show it, and a bad file is named in one line."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.data.sample_images import random_image
from tests.refusals import refused
from zoo.data.dataset import open_source
from zoo.data.map_dataset import MapDataset
from zoo.data.reading import Unreachable, read_image
from zoo.data.sources.index import index_path
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError


def _saved(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK"])
def test_every_common_mode_becomes_rgb_of_the_same_look(tmp_path: Path, mode: str) -> None:
    checks = np.zeros((8, 8, 3), np.uint8)
    checks[:, 4:] = 255
    kind = "jpg" if mode == "CMYK" else "png"
    image = read_image(_saved(tmp_path / f"a.{kind}", Image.fromarray(checks).convert(mode)))
    assert image.mode == "RGB"
    assert np.abs(_pixels(image) - checks).max() <= 2  # JPEG's error


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_transparency_is_dropped_without_warning(tmp_path: Path, mode: str) -> None:
    image = random_image(0).convert(mode)
    transparency = {"P": bytes(range(256)), "L": 7, "RGB": (1, 2, 3)}[mode]
    path = _saved(tmp_path / "a.png", image, transparency=transparency)
    assert np.array_equal(_pixels(read_image(path)), _pixels(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_16_bit_gray_preserves_shades(tmp_path: Path, kind: str) -> None:
    shades = np.arange(256, dtype=np.uint16)
    ramp = (shades * 256 + shades[::-1]).reshape(16, 16)
    image = read_image(_saved(tmp_path / f"a.{kind}", Image.fromarray(ramp)))
    assert np.array_equal(_pixels(image)[..., 0], np.arange(256).reshape(16, 16))


def _truncated(path: Path, kind: str) -> None:
    random_image(0, 64, 64).save(path, kind)
    path.write_bytes(path.read_bytes()[:-900])


def _png_with_damaged_chunk(path: Path) -> None:
    random_image(0).save(path, "PNG")
    data = bytearray(path.read_bytes())
    data[20] ^= 255  # in the header, whose checksum is then wrong
    path.write_bytes(bytes(data))


def _bomb(path: Path) -> None:
    side = 40_000  # 1.6 Gpx in a file of a few bytes
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    path.write_bytes(b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header)


BAD_FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "one-byte": lambda path: path.write_bytes(b"P"),
    "text": lambda path: path.write_text("<html>not found</html>"),
    "truncated-jpeg": lambda path: _truncated(path, "JPEG"),
    "truncated-png": lambda path: _truncated(path, "PNG"),
    "damaged-png": _png_with_damaged_chunk,
    "bomb": _bomb,
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_broken_image_is_named_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image.png"
    BAD_FILES[kind](path)
    message = refused(DataError, lambda: read_image(path), "image.png: an image cannot be read: ")
    assert message.count(str(path)) == 1
    assert "\n" not in message
    assert "object at 0x" not in message
    assert "index out of range" not in message


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_fault_of_file_system_at_begin_does_not_blame_file(
    shards: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    index_path(shards / "val").unlink()

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr("tarfile.open", fail)
    refused(Unreachable, lambda: open_source(shards / "val"), os.strerror(number))
    monkeypatch.setattr("os.walk", lambda root, onerror, **options: onerror(OSError(number, os.strerror(number), "x")))
    refused(Unreachable, lambda: open_source(folder / "val"), os.strerror(number))


def test_item_of_data_set_is_not_called_file(tmp_path: Path) -> None:
    dataset = MapDataset([(random_image(0), -1)], ValTransform(-1, 8, [0.5] * 3, [0.5] * 3))
    assert "file" not in refused(DataError, lambda: dataset[0, 0], "label is -1")


def test_out_of_memory_does_not_blame_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _fail(*args: object) -> None:
        raise MemoryError

    path = _saved(tmp_path / "a.png", random_image(0))
    monkeypatch.setattr(ImageFile.ImageFile, "load", _fail)
    with pytest.raises(MemoryError):
        read_image(path)
