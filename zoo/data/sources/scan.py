"""Scanning a folder with one sub-folder per class for images, in torchvision's order."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zoo.data.reading import EXTENSIONS, is_of_file_system, unreachable
from zoo.data.sources.location import DataPath
from zoo.errors import DataError, escape, join_names
from zoo.tables import counted

logger = logging.getLogger(__name__)


def scan_folder(root: Path, allow_empty_classes: bool = False) -> tuple[list[str], list[bytes], list[int]]:
    """Return the class folders in ``root``, their images relative to ``root``, and the class indices of the images.

    Sorted by class, folder and name as in torchvision. Raises DataError if ``root`` is missing, cannot be listed, or
    has no class folder or image, and for a class without images, which ``allow_empty_classes`` only logs.
    """
    classes = class_folders(root)
    names, skipped = find_names(root)
    images = [name for name in names if os.sep in name]
    log_skipped(root, [*skipped, *(name for name in names if os.sep not in name)])
    numbers = {name: number for number, name in enumerate(classes)}
    targets = [numbers[name.partition(os.sep)[0]] for name in images]
    check_filled(root, classes, targets, allow_empty_classes)
    return classes, list(map(os.fsencode, images)), targets


def class_folders(root: Path) -> list[str]:
    """Return the sorted names of the class folders in ``root``. Raises DataError if it cannot be listed."""
    if not os.path.isdir(root):
        needed = "it needs train/ and val/, each with one folder of images per class"
        if not os.path.isdir(root.parent):
            raise DataError("there is no such folder", root.parent, needed)
        present = join_names(sorted(os.listdir(root.parent))) or "nothing"
        raise DataError(f"there is no folder {root.name}/ (but {present})", root.parent, needed)
    try:
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        _raise_unlistable(error)


def find_images(root: Path, endings: Sequence[str] = EXTENSIONS, recursive: bool = True) -> list[Path]:
    """Return the images in ``root``, with ``recursive`` also in subfolders, see `find_names`. DataError if none."""
    images, skipped = find_names(root, endings, recursive)
    if not images:
        remedy = f"images are files that end in {' '.join(endings)}"
        raise DataError("there is no image in the folder", root, remedy)
    log_skipped(root, skipped)
    return [root / name for name in images]


def find_names(root: Path, endings: Sequence[str] = EXTENSIONS, recursive: bool = True) -> tuple[list[str], list[str]]:
    """Return the images and the other files in ``root`` and its sub-folders, by their names relative to ``root``.

    An image is a file with one of the ``endings``, in upper or lower case, that is not hidden. Links are followed, as
    in torchvision, and hidden folders are not searched. The names are sorted by the folder in ``root``, then by the
    path of the folder, then by name; the order determines the index of each image. Raises DataError for a folder that
    cannot be listed, and for a link to a folder that is searched anyway: its images would be counted twice.
    """
    lowered = tuple(ending.lower() for ending in endings)
    listed: list[tuple[str, str, list[str]]] = []
    searched: dict[tuple[int, int], str] = {}  # (device, inode) -> folder
    for folder, folders, files in os.walk(root, onerror=_raise_unlistable, followlinks=True):
        status = os.stat(folder)
        first = searched.setdefault((status.st_dev, status.st_ino), folder)
        if first != folder:
            raise DataError(f"it is the same folder as {escape(first)}", folder, "remove the link between them")
        relative = "" if folder == os.fspath(root) else os.path.relpath(folder, root)
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
        listed.append((relative.partition(os.sep)[0], relative, files))
    images: list[str] = []
    others: list[str] = []
    for _, relative, files in sorted(listed):
        for name in sorted(files):
            is_image = name.lower().endswith(lowered) and not name.startswith(".")
            (images if is_image else others).append(os.path.join(relative, name))
    return images, others


def log_skipped(root: Path, names: Sequence[str]) -> None:
    """Log the number of files in ``root`` that are not images, and the first of their ``names``."""
    if names:
        logger.warning("skipped %s, the first is %s; %s", counted(len(names), "file"), escape(names[0]), escape(root))


def _raise_unlistable(error: OSError) -> NoReturn:
    if is_of_file_system(error):
        raise unreachable(error, error.filename) from error
    raise DataError(
        f"a folder cannot be listed: {error.strerror}", error.filename, "correct its permissions"
    ) from error


def check_filled(root: DataPath, classes: Sequence[str], targets: Sequence[int], allow_empty_classes: bool) -> None:
    """Raise DataError unless there are classes and every class has images; see `scan_folder`."""
    extensions = " ".join(EXTENSIONS)
    if not classes or not len(targets):
        what = f"{counted(len(classes), 'class folder')} and no image"
        raise DataError(what, root, f"it needs one folder per class with images ({extensions})")
    filled = set(targets)
    empty = [name for target, name in enumerate(classes) if target not in filled]
    if not empty:
        return
    what = f"{len(empty)} of {len(classes)} class folders are empty ({join_names(empty)})"
    if not allow_empty_classes:
        raise DataError(what, root, f"put images ({extensions}) there or remove the folders")
    logger.warning("%s; %s", what, escape(root))
