"""Class folders as a source of classified images; `zoo.data.sources.shards` is the same for tar files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zoo.data.reading import read_bytes
from zoo.data.sources.scan import scan_folder
from zoo.errors import DataError

MAX_SIZES = 1000  # number of files whose sizes are read: network storage takes minutes for a million files


def source_digest(classes: Sequence[str], names: np.ndarray, details: Sequence[np.ndarray] = ()) -> str:
    """Return the sha256 of the names of classes and images and of ``details``."""
    digest = hashlib.sha256("\0".join(classes).encode("utf-8", errors="surrogateescape"))
    for array in (names, *details):
        digest.update(array.tobytes())
    return digest.hexdigest()


def sizes_digest(file_name: Callable[[int], str], count: int) -> str:
    """Return the sha256 of the sizes of at most `MAX_SIZES` of ``count`` files, spread evenly; -1 for missing files."""
    paths = map(file_name, range(0, count, max(1, -(-count // MAX_SIZES))))
    sizes = [os.path.getsize(path) if os.path.exists(path) else -1 for path in paths]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()


class FolderSource:
    """The images of class folders, see `zoo.data.sources.scan.scan_folder`. Raises the same errors.

    Names and targets are numpy arrays, because a forked worker copies the page of every Python object that it touches.

    Args:
    - `root`: the folder.
    - `allow_empty_classes`: whether class folders may be empty.
    - `classes`: names of the classes, in the order of their numbers.
    - `names`: names of the images, relative to ``root``, (n,) bytes.
    - `targets`: class indices of the images, (n,).
    """

    # No further arrays are needed to identify the images: names contain the classes.
    details: Sequence[np.ndarray] = ()
    remedy = "replace or remove the file"  # for an unusable image

    def __init__(self, root: Path, allow_empty_classes: bool = False) -> None:
        self.root = root
        self.classes, names, targets = scan_folder(root, allow_empty_classes)
        self.names, self.targets = np.array(names), np.array(targets)

    def read(self, index: int) -> bytes:
        """Return the encoded image ``index``."""
        return read_bytes(os.path.join(self.root, os.fsdecode(self.names[index])))

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random permutation of the images. Raises DataError for a ``window``, because it needs shards."""
        if window is not None:
            what = f"input.shuffle_shards = {window} needs shards, not class folders"
            raise DataError(what, self.root, "remove the key, or create shards with zoo data shard")
        return torch.randperm(len(self.names), generator=generator)
