"""Sources of classified images: the protocol, and class folders. `zoo.data.shards` has tar files.

Tested by tests/data/test_shards.py.
"""

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

from zoo.data.index import REINDEX_HINT, Index, index_path, write_index
from zoo.data.location import DataPath
from zoo.data.reading import read_bytes
from zoo.data.scan import check_filled, scan_folder
from zoo.errors import DataError, escape

logger = logging.getLogger(__name__)

FOLDER = "folder"  # the kind of its index


class Source(Protocol):
    """Classified images with random access.

    Names and targets are numpy arrays, because a forked worker copies the page of every Python object that it touches.

    Args:
    - `classes`: names of the classes, in the order of their numbers.
    - `names`: names of the images, relative to ``root``, (n,) bytes.
    - `targets`: class indices of the images, (n,).
    """

    classes: list[str]
    names: np.ndarray
    targets: np.ndarray

    @property
    def root(self) -> DataPath:
        """The folder of the images, for messages."""
        ...

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """Further arrays that identify the images, for `source_digest`."""
        ...

    def read(self, index: int) -> bytes:
        """Return the encoded image ``index``; `zoo.data.reading.Unreadable` if it cannot be read."""
        ...

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random permutation of the images, (n,) int64; for ``window`` see `zoo.data.shards.Shards.order`."""
        ...


def source_digest(classes: Sequence[str], names: np.ndarray, details: Sequence[np.ndarray] = ()) -> str:
    """Return the sha256 of the names of classes and images and of ``details``, see `Source`.

    It does not cover file sizes and contents, because network storage takes minutes to stat a million files.
    """
    digest = hashlib.sha256("\0".join(classes).encode("utf-8", errors="surrogateescape"))
    for array in (names, *details):
        digest.update(array.tobytes())
    return digest.hexdigest()


class FolderSource:
    """The images of class folders, listed by their index or by `zoo.data.scan.scan_folder`.

    An outdated index is ignored with a warning. Raises DataError if the folder is unusable.

    Args:
    - `root`: the folder.
    - `allow_empty_classes`: whether class folders may be empty.
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
        """Empty, because the file names contain the classes."""
        return ()

    def read(self, index: int) -> bytes:
        """Return the encoded image ``index``."""
        return read_bytes(os.path.join(self.root, os.fsdecode(self.names[index])))

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random permutation of the images; DataError for a ``window``, which needs shards."""
        if window is not None:
            what = f"input.shuffle_shards = {window} needs shards, not class folders"
            raise DataError(what, self.root, "remove the key, or create shards with zoo data shard")
        return torch.randperm(len(self.names), generator=generator)

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if "_index" in state:  # the index has the arrays
            del state["names"], state["targets"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        if "_index" in state:
            self.names, self.targets = self._index.arrays["names"], self._index.arrays["targets"]


def write_folder_index(root: Path) -> int:
    """Write the index of the folder ``root``; return the number of images. Raises DataError as `scan_folder` does.

    The index stores the modification time of each folder, which changes when an entry is added, removed or renamed.
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
                "the index is ignored, because %s has changed since it was written; %s: %s",
                escape(root / name), escape(path), REINDEX_HINT,
            )  # fmt: skip
            return None
    return index
