"""Sources of classified images: the protocol, and class folders. `zoo.data.shards` reads tar files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zoo.data.index import Index, index_path, write_index
from zoo.data.location import DataPath
from zoo.data.reading import read_bytes
from zoo.data.scan import check_filled, scan_folder
from zoo.errors import DataError, printable

logger = logging.getLogger(__name__)

FOLDER = "folder"  # the kind of its index


class Source(Protocol):
    """Images with a class each, with random access.

    Names and targets are numpy arrays, because each worker copies the memory page of every Python object it touches.

    Args:
    - `classes`: names of the classes; their order numbers them.
    - `names`: names of the images, relative to ``root``, (n,) bytes.
    - `targets`: class indices of the images, (n,).
    """

    classes: list[str]
    names: np.ndarray
    targets: np.ndarray

    @property
    def root(self) -> DataPath:
        """The folder that messages name."""
        ...

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """Arrays that distinguish the images besides ``names``."""
        ...

    def read(self, index: int) -> bytes:
        """Return the bytes of the file of image ``index``; `zoo.data.reading.Unreadable` with its name otherwise."""
        ...

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, (n,) int64; see `zoo.data.shards.Shards.order` for the ``window``."""
        ...


def source_digest(classes: Sequence[str], names: np.ndarray, details: Sequence[np.ndarray] = ()) -> str:
    """Return the sha256 of the names of classes and images and of ``details``, see `Source`.

    Sizes and contents of files are not part of it: network storage takes minutes to stat a million files.
    """
    digest = hashlib.sha256("\0".join(classes).encode("utf-8", errors="surrogateescape"))
    for array in (names, *details):
        digest.update(array.tobytes())
    return digest.hexdigest()


class FolderSource:
    """The images of a folder with one folder per class, from its index, or from `zoo.data.scan.scan_folder`.

    An outdated index is ignored with a warning. Raises DataError if the folder has no usable content.

    Args:
    - `root`: the folder.
    - `allow_empty_classes`: whether class folders may hold no image.
    """

    def __init__(self, root: Path, allow_empty_classes: bool = False) -> None:
        self.root = root
        index = _fresh_index(root)
        if index is None:
            scan = scan_folder(root, allow_empty_classes)
            self.classes, self.names, self.targets = scan.classes, np.array(scan.names), np.array(scan.targets)
            return
        self._index = index  # pickled instead of the arrays
        self.classes = [str(name) for name in index.header["classes"]]
        self.names, self.targets = index.arrays["names"], index.arrays["targets"]
        check_filled(root, self.classes, np.unique(self.targets).tolist(), allow_empty_classes)

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """Nothing: the names of the files contain the classes."""
        return ()

    def read(self, index: int) -> bytes:
        """Return the bytes of the file of image ``index``."""
        return read_bytes(os.path.join(self.root, os.fsdecode(self.names[index])))

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images; DataError for a ``window``, which only shards have."""
        if window is not None:
            raise DataError(
                f"input.shuffle_shards = {window}: {printable(self.root)} is a folder and has no shards; remove the "
                "key, or make shards with zoo data shard"
            )
        return torch.randperm(len(self.names), generator=generator)

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if "_index" in state:  # which has the arrays
            del state["names"], state["targets"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        if "_index" in state:
            self.names, self.targets = self._index.arrays["names"], self._index.arrays["targets"]


def write_folder_index(root: Path) -> int:
    """Write the index of the folder ``root``; return the number of images. Raises DataError as `scan_folder` does.

    The index has the modification time of each folder, which changes when an entry is added, removed or renamed. It
    does not detect changed sub-folders of a linked folder.
    """
    scan = scan_folder(root, allow_empty_classes=True)
    header = {"kind": FOLDER, "classes": scan.classes}
    path = index_path(root)
    arrays = {
        "names": np.array(scan.names),
        "targets": np.array(scan.targets, dtype=np.int32),
        "folders": np.array([os.fsencode(name) for name in scan.times]),
        "times": np.array(list(scan.times.values()), dtype=np.int64),
    }
    write_index(path, header, arrays)
    return len(scan.names)


def _fresh_index(root: Path) -> Index | None:
    """Return the index of the folder ``root``; None if it does not exist or is outdated."""
    path = index_path(root)
    if not path.is_file():
        return None
    index = Index(path)
    index.check_images(FOLDER, {"names": "S", "targets": "i"})
    index.check_columns({"folders": "S", "times": "i"})
    folders, times = index.arrays["folders"], index.arrays["times"].tolist()
    for name, time in zip(map(os.fsdecode, folders), times, strict=True):
        try:
            changed = os.stat(root / name).st_mtime_ns != time
        except (OSError, ValueError):  # ValueError: a zero byte in the name
            changed = True
        if changed:
            logger.warning(
                "the index is not used, as %s has changed since it was made; %s: make it anew with zoo data index",
                printable(root / name), printable(path),
            )  # fmt: skip
            return None
    return index
