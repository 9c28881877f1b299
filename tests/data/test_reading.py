"""Every kind of image becomes 8-bit RGB as a viewer would show it, and a bad file is named in one line."""

from __future__ import annotations

import errno
import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from tests.data.sample_images import make_splits, random_image
from tests.data.sample_labels import make_labeled
from tests.refusals import refused
from zoo.data import reading
from zoo.data.dataset import ImageDataset, ImageFolder, open_source
from zoo.data.map_dataset import MapDataset
from zoo.data.prepare.write_shards import write_shards
from zoo.data.reading import Unreachable, read_image
from zoo.data.segmentation.label_maps import labeled_images
from zoo.data.segmentation.loader import LabeledFolder
from zoo.data.segmentation.transforms import SegmentationVal
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.index import index_path
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError
from zoo.files import open_regular


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


def _truncated_jpeg(path: Path) -> None:
    random_image(0, 64, 64).save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:-900])


def _truncated_png(path: Path) -> None:
    random_image(0, 64, 64).save(path, "PNG")
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
    "truncated-jpeg": _truncated_jpeg,
    "truncated-png": _truncated_png,
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


class _Flaky:
    """Opens files, except in the first ``times`` calls, which fail with errno ``number``."""

    def __init__(self, number: int, times: int) -> None:
        self._number, self._times = number, times

    def __call__(self, path: Any) -> Any:
        self._times -= 1
        if self._times >= 0:
            raise OSError(self._number, os.strerror(self._number), os.fspath(path))
        return open_regular(path)


FAULTS = [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE, errno.ENFILE]
KINDS = ["folder", "shards", "items", "label maps"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the delays instead of waiting."""
    seconds: list[float] = []
    monkeypatch.setattr("zoo.files.sleep", seconds.append)
    return seconds


def _dataset(kind: str, folder: Path) -> ImageDataset:
    """Return images in ``folder``, all of which are read with `_open`."""
    transform = ValTransform(-1, 8, [0.5] * 3, [0.5] * 3)
    if kind == "label maps":
        found = labeled_images(make_labeled(folder), "train", "folders", 3, 255)
        return LabeledFolder(found, SegmentationVal([0.5] * 3, [0.5] * 3, None), ignore_label=255)
    data = make_splits(folder / "data")
    if kind == "items":

        class Items(list[Path]):
            def __getitem__(self, index: Any) -> Any:
                with reading.open_regular(super().__getitem__(index)) as file:
                    return Image.open(io.BytesIO(file.read())), 0

        return MapDataset(Items(sorted((data / "val").glob("*/*"))), transform)
    if kind == "shards":
        write_shards(FolderSource(data / "val"), folder / "val", per_shard=4, seed=None)
        return ImageFolder(folder / "val", transform)
    return ImageFolder(data / "val", transform)


def _break(monkeypatch: pytest.MonkeyPatch, flaky: _Flaky) -> None:
    for module in ("reading", "sources.shards"):
        monkeypatch.setattr(f"zoo.data.{module}.open_regular", flaky)


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_transient_file_system_error_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], kind: str, number: int
) -> None:
    dataset = _dataset(kind, tmp_path)
    expected = dataset[0, 3]
    _break(monkeypatch, _Flaky(number, 2))
    assert torch.equal(dataset[0, 3].drawn.pixels, expected.drawn.pixels)
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_persistent_file_system_error_does_not_blame_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], kind: str, number: int
) -> None:
    dataset = _dataset(kind, tmp_path)
    _break(monkeypatch, _Flaky(number, 10**9))
    advice = "ulimit -n" if number in (errno.EMFILE, errno.ENFILE) else "network drive"
    assert "replace" not in refused(Unreachable, lambda: dataset[0, 3], os.strerror(number), advice)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ELOOP])
@pytest.mark.parametrize("kind", ["folder", "shards", "label maps"])
def test_fault_of_one_file_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], kind: str, number: int
) -> None:
    dataset = _dataset(kind, tmp_path)
    _break(monkeypatch, _Flaky(number, 10**9))
    refused(DataError, lambda: dataset[0, 3], f"{os.strerror(number)}; replace")
    assert waits == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_fault_of_file_system_at_begin_does_not_blame_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], number: int
) -> None:
    _dataset("shards", tmp_path)
    index_path(tmp_path / "val").unlink()

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr("tarfile.open", fail)
    refused(Unreachable, lambda: open_source(tmp_path / "val"), os.strerror(number))
    monkeypatch.setattr("os.walk", lambda root, onerror, **options: onerror(OSError(number, os.strerror(number), "x")))
    refused(Unreachable, lambda: open_source(tmp_path / "data" / "val"), os.strerror(number))


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
