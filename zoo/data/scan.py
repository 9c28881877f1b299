"""Scanning a folder with one sub-folder per class for images, in torchvision's order."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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


class _Folder(NamedTuple):
    """A folder and its entries by kind; all names are relative to the root of the scan."""

    name: str
    folders: list[str]
    images: list[str]
    strays: list[str]


def scan_folder(root: Path, allow_empty_classes: bool = False) -> Scan:
    """Return the images below ``root``, sorted by class, folder and name as in torchvision.

    An image is a file with an image extension, in upper or lower case. Other and hidden files are skipped, and their
    number is logged. Links are followed, as in torchvision. Raises DataError if ``root`` is missing, cannot be listed,
    or has no class folder or image. A class without images raises DataError, or is logged with ``allow_empty_classes``.
    """
    _check_exists(root)
    search = _Search(root)
    top = search.entries()
    scan = Scan(root, sorted(top.folders), strays=sorted(top.images + top.strays))
    for target, name in enumerate(scan.classes):
        for folder in search.walk(name):
            scan.names += map(os.fsencode, folder.images)
            scan.targets += [target] * len(folder.images)
            scan.strays += folder.strays
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
    search = _Search(root)
    top = search.entries()
    folders = [top, *(folder for name in sorted(top.folders) for folder in search.walk(name))]
    return [name for folder in folders for name in folder.images], [
        name for folder in folders for name in folder.strays
    ]


class _Search:
    """Lists the folders below ``root``, and follows links."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def walk(self, top: str) -> list[_Folder]:
        """Return ``top`` and the folders below it, sorted by name; their order determines the index of each image."""
        folders, names = [], [top]
        while names:
            folders.append(self.entries(names.pop()))
            names += folders[-1].folders
        return sorted(folders)

    def entries(self, name: str = "") -> _Folder:
        """Return the entries of one folder, images and strays sorted by name."""
        path = self._root / name
        prefix = os.path.join(name, "")
        folder = _Folder(name, [], [], [])
        try:
            with os.scandir(path) as listing:
                for entry in listing:
                    _kind_of(entry, folder).append(prefix + entry.name)
        except OSError as error:
            raise unlistable(path, error) from error
        folder.images.sort()
        folder.strays.sort()
        return folder


def _kind_of(entry: os.DirEntry[str], folder: _Folder) -> list[str]:
    """Return the list of ``folder`` that ``entry`` belongs to. Only links need a system call."""
    if entry.name.startswith("."):
        return folder.strays
    if _leads_to_folder(entry):
        return folder.folders
    return folder.images if entry.name.lower().endswith(EXTENSIONS) else folder.strays


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself or to a folder without permission; reading it raises the error
        return False


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
    """Log the number of skipped entries of ``root``, by kind."""
    if not strays:
        return
    kinds = Counter(_extension(path) for path in strays).most_common()
    logger.warning(
        "%d entries are not images and are left out (%s), such as %s; %s",
        len(strays),
        join_names(f"{kind}: {count}" for kind, count in kinds),
        escape(strays[0]),
        escape(root),
    )


def _extension(path: str) -> str:
    name = os.path.basename(path)
    return "hidden" if name.startswith(".") else os.path.splitext(name)[1].lower() or "no extension"
