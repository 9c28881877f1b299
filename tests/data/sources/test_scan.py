"""A folder is listed in torchvision's order, and skipped files are logged."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder as TorchvisionFolder

from tests.data.sample_images import make_folder, random_image
from zoo.data.reading import read_bytes
from zoo.data.sources.scan import scan_folder
from zoo.errors import DataError


def test_images_and_classes_have_the_order_of_torchvision(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "train", {"b": 2, "B": 1, "a-b": 1, "a": 3, "ä": 1})
    for name in ("sub/z.JPEG", "sub.x/y.Png", "Sub/x.webp", "10.bmp", "9.TIF", "linked.jpg"):
        (root / "a" / name).parent.mkdir(exist_ok=True)
        (root / "a" / name).write_bytes(b"")
    elsewhere = make_folder(tmp_path / "elsewhere", {"a": 2, "b": 1})
    (root / "link").symlink_to(elsewhere / "a", target_is_directory=True)
    (root / "b" / "link").symlink_to(elsewhere / "b", target_is_directory=True)
    (classes, names, targets), expected = scan_folder(root), TorchvisionFolder(root)
    assert classes == expected.classes
    paths = [str(root / os.fsdecode(name)) for name in names]
    assert list(zip(paths, targets, strict=True)) == expected.samples


def test_fifo_and_broken_link_count_as_unreadable_images(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "train", {"a": 1})
    os.mkfifo(root / "a" / "fifo.png")
    (root / "a" / "broken.png").symlink_to("nowhere.png")
    (root / "a" / "loop.png").symlink_to("loop.png")
    faults = []
    for name in scan_folder(root)[1]:
        try:
            read_bytes(root / os.fsdecode(name))
        except DataError as error:
            faults.append(str(error).removeprefix(f"{root}/a/"))
    assert faults == [
        "broken.png: an image cannot be read: No such file or directory",
        "fifo.png: an image cannot be read: it is a FIFO, a socket or a device, not a regular file",
        "loop.png: an image cannot be read: Too many levels of symbolic links",
    ]


def test_other_files_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = make_folder(tmp_path / "train", {"a": 1, "b": 1})
    for name in ("stray.png", "a/notes.TXT", "b/._000.png", "b/x.gif"):
        (root / name).write_text("text")
    (root / ".cache").mkdir()
    (root / "a" / ".hidden").mkdir()
    random_image(0).save(root / "a" / ".hidden" / "c.png")
    with caplog.at_level(logging.WARNING):
        assert scan_folder(root) == (["a", "b"], [b"a/000.png", b"b/000.png"], [0, 1])
    assert caplog.messages == [f"skipped 4 files, the first is a/notes.TXT; {root}"]
