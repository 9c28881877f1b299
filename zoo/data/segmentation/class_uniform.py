"""Class-uniform sampling: rare classes occur in as many training crops as frequent classes.

Draws a class uniformly, then an image that contains it, then a pixel of that class, then a crop that contains the
pixel. Void is not a class. Source: In-Place Activated BatchNorm, section 4.2.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from functools import partial
from random import Random

import numpy as np

from zoo.data.reading import is_of_file_system, read_many, unreachable
from zoo.data.segmentation.label_maps import LabeledImages, read_label
from zoo.data.segmentation.transforms import Pixel
from zoo.errors import DataError, escape, join_names
from zoo.files import cache_dir, file_lock, write_bytes

logger = logging.getLogger(__name__)

FOLDER = "class-index"
VERSION = b"1"  # version of the index format


class ClassUniform:
    """Draws a class and an image that contains it.

    Classes that no image contains are never drawn, and are logged. Raises DataError if no image contains any class.

    Args:
    - `found`: the training images.
    - `holds`: (images, classes), bool: whether an image contains a class, see `load_class_index`.
    """

    def __init__(self, found: LabeledImages, holds: np.ndarray) -> None:
        present = np.asarray(holds.any(axis=0))
        absent = [name for name, is_present in zip(found.classes, present, strict=True) if not is_present]
        if not present.any():
            remedy = "class-uniform sampling (segmentation.class_uniform) needs label maps that are not entirely void"
            raise DataError("no training image has a pixel of any class", found.root, remedy)
        if absent:
            logger.warning(
                "%d of %d classes are in no training image and are not drawn: %s; %s",
                len(absent), len(found.classes), join_names(absent), escape(found.root),
            )  # fmt: skip
        # Arrays instead of a list per class, because workers share their memory.
        self._classes = np.flatnonzero(present)
        self._starts = np.concatenate([[0], np.cumsum(holds.sum(axis=0)[self._classes])])
        self._images = np.concatenate([np.flatnonzero(holds[:, number]) for number in self._classes])

    def draw(self, generator: Random) -> tuple[int, int]:
        """Return a class and the index of an image that contains it."""
        choice = generator.randrange(len(self._classes))
        start, end = self._starts[choice], self._starts[choice + 1]
        return int(self._classes[choice]), int(self._images[start + generator.randrange(int(end - start))])


def draw_pixel(classes: np.ndarray, number: int, generator: Random) -> Pixel | None:
    """Return a random pixel of class ``number``; None if there is none."""
    positions = np.flatnonzero(classes == number)
    if not len(positions):
        return None
    row, column = divmod(int(positions[generator.randrange(len(positions))]), classes.shape[1])
    return Pixel(row, column)


def load_class_index(found: LabeledImages, *, workers: int = 0) -> np.ndarray:
    """Return whether each image contains each class, (images, classes) bool, from the cache or from all label maps.

    The cache key covers the classes and the names, sizes and modification times of the label maps. One of several
    processes reads the label maps, with ``workers`` threads, and the others wait. Raises DataError for a label map that
    cannot be read, and if the cache cannot be written.
    """
    try:
        file = cache_dir() / FOLDER / f"{_digest(found)}.npy"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(file.with_suffix(".lock")):
            if not file.exists():
                content = io.BytesIO()
                np.save(content, _build(found, workers), allow_pickle=False)
                write_bytes(file, content.getvalue())
        return np.asarray(np.load(file, allow_pickle=False))
    except OSError as error:
        if is_of_file_system(error):
            raise unreachable(error, error.filename) from error
        what = f"the index of classes cannot be made: {error.strerror}"
        raise DataError(what, error.filename, "replace the label map, or set ZOO_CACHE to another folder") from error


def _build(found: LabeledImages, workers: int) -> np.ndarray:
    logger.info("reading %d label maps to index their classes", len(found.labels))
    read = partial(_held_classes, found)
    return np.stack(list(read_many(read, found.labels, workers)))


def _held_classes(found: LabeledImages, label: str) -> np.ndarray:
    """Return for each class whether a label map has a pixel of it. The ignore label is larger than any class."""
    classes = read_label(found.root / label, found.table)
    return np.bincount(classes.ravel(), minlength=len(found.classes))[: len(found.classes)] > 0


def _digest(found: LabeledImages) -> str:
    digest = hashlib.sha256(VERSION + found.table.tobytes())
    digest.update("\0".join(found.classes).encode("utf-8", errors="surrogateescape"))
    for label in found.labels:
        status = os.stat(found.root / label)
        digest.update(os.fsencode(label) + b"\0%d %d\n" % (status.st_size, status.st_mtime_ns))
    return digest.hexdigest()
