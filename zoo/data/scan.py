"""Scanning a folder with one sub-folder per class for images, in torchvision's order."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from zoo.data.location import DataPath
from zoo.data.reading import EXTENSIONS
from zoo.errors import DataError, escape, join_names

logger = logging.getLogger(__name__)


@dataclass
class Scan:
    """The content of a data folder.

    Args:
    - `root`: the folder.
    - `classes`: names of the class folders.
    - `names`: files of the images, relative to ``root``, as bytes.
    - `targets`: class indices of the images.
    - `strays`: other entries.
    """

    root: Path
    classes: list[str]
    names: list[bytes] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)


def scan_folder(root: Path, allow_empty_classes: bool = False) -> Scan:
    """Return the images below ``root``, sorted by class, folder and name as in torchvision.

    An image is a file with an image extension, in upper or lower case. Other and hidden files are skipped, and their
    number is logged. Links are followed, as in torchvision. Raises DataError if ``root`` is missing, cannot be listed,
    or has no class folder or image. A class without images raises DataError, or is logged with ``allow_empty_classes``.
    """
    _check_exists(root)
    classes, images, strays = _entries(root)
    scan = Scan(root, classes, strays=images + strays)
    for target, name in enumerate(classes):
        images, strays = _walk(root, name)
        scan.names += map(os.fsencode, images)
        scan.targets += [target] * len(images)
        scan.strays += strays
    check_filled(root, scan.classes, scan.targets, allow_empty_classes, len(scan.strays))
    log_strays(root, scan.strays)
    return scan


def find_images(root: Path) -> list[Path]:
    """Return the images in ``root`` and its sub-folders, found and sorted as in `scan_folder`.

    Raises DataError as `scan_folder` does, and if there is no image.
    """
    images, strays = find_names(root)
    if not images:
        what = f"there is no image in the folder, but {len(strays)} other entries"
        raise DataError(what, root, f"images are files that end in {' '.join(EXTENSIONS)}")
    log_strays(root, strays)
    return [root / name for name in images]


def find_names(root: Path) -> tuple[list[str], list[str]]:
    """Return the images and the other entries in ``root`` and its sub-folders, by their names relative to ``root``.

    Order and errors are the same as in `find_images`, but there may be no image.
    """
    folders, images, strays = _entries(root)
    for name in folders:
        more_images, more_strays = _walk(root, name)
        images += more_images
        strays += more_strays
    return images, strays


def _entries(root: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the folders, the images and the other entries in ``root`` itself, sorted by name."""
    _, folders, files = next(os.walk(root, onerror=_raise_unlistable))
    shown = [name for name in folders if not name.startswith(".")]
    images = list(filter(_is_image, files))
    return sorted(shown), sorted(images), sorted({*folders, *files} - {*shown, *images})


def _walk(root: Path, top: str) -> tuple[list[str], list[str]]:
    """Return the images and the other entries in the folder ``top`` of ``root`` and below, relative to ``root``.

    They are sorted by folder and name, which determines the index of each image. Links are followed.
    """
    listed: list[tuple[str, list[str]]] = []
    images: list[str] = []
    strays: list[str] = []
    for folder, folders, files in os.walk(root / top, onerror=_raise_unlistable, followlinks=True):
        place = os.path.relpath(folder, root)
        hidden = [name for name in folders if name.startswith(".")]
        strays += [os.path.join(place, name) for name in hidden]
        folders[:] = [name for name in folders if name not in hidden]
        listed.append((place, files))
    for place, files in sorted(listed):
        for name in sorted(files):
            (images if _is_image(name) else strays).append(os.path.join(place, name))
    return images, strays


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def _raise_unlistable(error: OSError) -> NoReturn:
    raise unlistable(Path(error.filename), error) from error


def _check_exists(root: Path) -> None:
    try:
        if stat.S_ISDIR(os.stat(root).st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise unlistable(root, error) from error
    if not root.parent.is_dir():
        remedy = "give a folder with train/ and val/, each with one folder of images per class"
        raise DataError(f"there is no folder {root.parent}", "DATA", remedy)
    try:
        present = join_names(sorted(os.listdir(root.parent))) or "nothing"
    except OSError as error:
        raise unlistable(root.parent, error) from error
    what = f"there is no folder {root.name}/ (but {present})"
    raise DataError(what, root.parent, "it needs train/ and val/, each with one folder of images per class")


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
