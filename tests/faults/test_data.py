"""Hostile or damaged data folders and image files end in one clear message, and never hang or fill the memory."""

from __future__ import annotations

import os
import struct
import zlib
from functools import partial
from pathlib import Path

import pytest

from tests.data.sample_images import make_folder
from tests.refusals import refused
from zoo.config.limits import MAX_PIXELS
from zoo.data.dataset import ImageFolder
from zoo.data.reading import read_image
from zoo.data.sources.scan import find_images, scan_folder
from zoo.data.transforms.classification import ValTransform
from zoo.errors import DataError


@pytest.mark.parametrize("denied", ["val", "val/bag"])
def test_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str) -> None:
    root = make_folder(tmp_path / "val", {"bag": 1})
    scandir = os.scandir

    def _deny(path: os.PathLike[str]) -> object:
        if os.fspath(path) == str(tmp_path / denied):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", _deny)  # file modes would not stop root
    for scan in (scan_folder, find_images):
        refused(DataError, partial(scan, root), f"{tmp_path / denied}: ", "Permission denied")


def test_control_characters_of_names_are_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_folder(tmp_path / "a\x1b[31m\nepoch 1", {"class\nname": 0, "b": 1})
    refusal = refused(DataError, lambda: scan_folder(root), r"class\nname")
    scan_folder(root, allow_empty_classes=True)
    for message in (refusal, *(record.getMessage() for record in caplog.records)):
        assert message.isprintable()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"


def test_reading_image_never_starts_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL passes PostScript to Ghostscript, here a script in PATH that records its call."""
    script, trace = tmp_path / "bin" / "gs", tmp_path / "trace"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho called >> {trace}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    (tmp_path / "x.jpg").write_bytes(EPS)
    refused(DataError, lambda: read_image(tmp_path / "x.jpg"), "x.jpg: ", "JPEG, PNG, PPM, BMP, TIFF, WEBP")
    assert not trace.exists()


def _png(path: Path, width: int, height: int) -> Path:
    """Write a gray PNG of one bit per pixel whose header promises this size; the pixels are few."""

    def _chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    lines = zlib.compress(b"\0" * min(height * ((width + 7) // 8 + 1), 1_000_000))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", lines) + _chunk(b"IEND", b""))
    return path


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(1, MAX_PIXELS + 1), (10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_raise_before_allocation(tmp_path: Path, size: tuple[int, int]) -> None:
    """PIL warns of the first two, and refuses the others."""
    path = _png(tmp_path / "x.png", *size)
    message = refused(DataError, lambda: read_image(path), "x.png: ")
    assert f"{MAX_PIXELS:,}" in message or "exceeds limit" in message


@pytest.mark.parametrize(("size", "scale"), [((1, 60_000), 256), ((60_000, 1), 256), ((60_000, 1), 9459)])
def test_resize_to_too_many_pixels_names_image(tmp_path: Path, size: tuple[int, int], scale: int) -> None:
    """312 bytes that would become 15.7 GB."""
    root = make_folder(tmp_path / "val", {"a": 1})
    path = _png(root / "a" / "thin.png", *size)
    images = ImageFolder(root, ValTransform(scale, 8, [0.5] * 3, [0.5] * 3))
    refused(DataError, lambda: images[0, 1], f"{path}: ", f"{size[0]} x {size[1]} px", "89,478,485")
