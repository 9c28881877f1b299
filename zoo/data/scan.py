"""Scanning a folder with one sub-folder per class for images, in torchvision's order."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zoo.data.location import DataPath
from zoo.data.reading import EXTENSIONS
from zoo.errors import DataError, escape, join_names

logger = logging.getLogger(__name__)


def scan_folder(root: Path, allow_empty_classes: bool = False) -> tuple[list[str], list[bytes], list[int]]:
    """Return the class folders in ``root``, their images relative to ``root``, and the class indices of the images.

    They are sorted by class, folder and name as in torchvision. An image is a file with an image extension, in upper or
    lower case. Other and hidden files are skipped, and their number is logged. Links are followed, as in torchvision.
    Raises DataError if ``root`` is missing, cannot be listed, or has no class folder or image. A class without images
    raises DataError, or is logged with ``allow_empty_classes``.
    """
    if not os.path.isdir(root):
        present = join_names(sorted(os.listdir(root.parent))) if os.path.isdir(root.parent) else ""
        what = f"there is no folder {root.name}/ (but {present or 'nothing'})"
        raise DataError(what, root.parent, "it needs train/ and val/, each with one folder of images per class")
    images, strays = find_names(root)
    _, folders, _ = next(os.walk(root, onerror=_raise_unlistable))
    classes = sorted(name for name in folders if not name.startswith("."))
    strays += [name for name in images if os.sep not in name]
    images = [name for name in images if os.sep in name]
    numbers = {name: number for number, name in enumerate(classes)}
    targets = [numbers[name.partition(os.sep)[0]] for name in images]
    check_filled(root, classes, targets, allow_empty_classes, len(strays))
    log_strays(root, strays)
    return classes, list(map(os.fsencode, images)), targets


def find_images(root: Path) -> list[Path]:
    """Return the images in ``root`` and its sub-folders, see `find_names`; DataError if there is none."""
    images, strays = find_names(root)
    if not images:
        what = f"there is no image in the folder, but {len(strays)} other entries"
        raise DataError(what, root, f"images are files that end in {' '.join(EXTENSIONS)}")
    log_strays(root, strays)
    return [root / name for name in images]


def find_names(root: Path) -> tuple[list[str], list[str]]:
    """Return the images and the other entries in ``root`` and its sub-folders, by their names relative to ``root``.

    They are sorted by the folder in ``root``, then by the path of the folder, then by name, which determines the index
    of each image. Links are followed. Raises DataError for a folder that cannot be listed.
    """
    listed: list[tuple[str, str, list[str]]] = []
    images: list[str] = []
    strays: list[str] = []
    for folder, folders, files in os.walk(root, onerror=_raise_unlistable, followlinks=True):
        place = "" if folder == os.fspath(root) else os.path.relpath(folder, root)
        hidden = [name for name in folders if name.startswith(".")]
        strays += [os.path.join(place, name) for name in hidden]
        folders[:] = [name for name in folders if name not in hidden]
        listed.append((place.partition(os.sep)[0], place, files))
    for _, place, files in sorted(listed):
        for name in sorted(files):
            is_image = name.lower().endswith(EXTENSIONS) and not name.startswith(".")
            (images if is_image else strays).append(os.path.join(place, name))
    return images, strays


def _raise_unlistable(error: OSError) -> NoReturn:
    raise unlistable(Path(error.filename), error) from error


def unlistable(folder: Path, error: OSError) -> DataError:
    """Return the error to raise for a folder that cannot be listed."""
    return DataError(f"a folder cannot be listed: {error.strerror}", folder, "correct its permissions")


def check_filled(
    root: DataPath, classes: Sequence[str], targets: Sequence[int], allow_empty_classes: bool, num_strays: int = 0
) -> None:
    """Raise DataError unless there are classes, and images of each class; see `scan_folder`."""
    extensions = " ".join(EXTENSIONS)
    if not classes or not len(targets):
        what = f"there are {len(classes)} class folders and no image in them, and {num_strays} other entries"
        raise DataError(what, root, f"it needs one folder per class with images ({extensions})")
    filled = set(targets)
    empty = [name for target, name in enumerate(classes) if target not in filled]
    if not empty:
        return
    what = f"{len(empty)} of {len(classes)} class folders are empty ({join_names(empty)})"
    if not allow_empty_classes:
        raise DataError(what, root, f"put images ({extensions}) there or remove the folders")
    logger.warning("%s; %s", what, escape(root))


def log_strays(root: Path, strays: list[str]) -> None:
    """Log the number of skipped entries of ``root``."""
    if strays:
        logger.warning(
            "%d entries are not images and are left out, such as %s; %s",
            len(strays), escape(strays[0]), escape(root),
        )  # fmt: skip
