"""Finds the images of a folder with one sub-folder per class, in torchvision's order."""

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
from zoo.errors import DataError, listed, printable

logger = logging.getLogger(__name__)


@dataclass
class Scan:
    """The content of a data folder.

    ``classes`` are the names of the class folders, ``names`` the files of the images, relative to ``root``, as bytes,
    ``targets`` their class indices, ``strays`` other entries, and ``times`` when each folder was last changed, by its
    name relative to ``root``, in ns.
    """

    root: Path
    classes: list[str]
    names: list[bytes] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)


class _Folder(NamedTuple):
    """A folder and its entries, sorted by kind; all names are relative to the folder where the search began."""

    name: str
    folders: list[str]
    images: list[str]
    strays: list[str]


def scan_folder(root: Path, allow_empty_classes: bool = False) -> Scan:
    """Return the images below ``root``, sorted by class, folder and name as torchvision sorts them.

    An image is a file with an image extension in upper or lower case. Other files and hidden ones are skipped, and
    their number is logged. Links are followed. Raises DataError if ``root`` is missing, cannot be listed, or has no
    class folder or image; if a class has no image (logged only, with ``allow_empty_classes``); if a link makes a folder
    count twice; and for a pipe, socket or device with the name of an image.
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
    scan.times = search.times
    check_filled(root, scan.classes, scan.targets, allow_empty_classes, len(scan.strays))
    log_strays(root, scan.strays)
    return scan


def find_images(root: Path) -> list[Path]:
    """Return the images in ``root`` and its sub-folders, those of sub-folders in the order of `scan_folder`.

    The same files count as images as there, and the same faults raise DataError, as does a folder without any image.
    """
    images, strays = find_names(root)
    if not images:
        raise DataError(
            f"there is no image in the folder, but {len(strays)} other entries; {printable(root)}: images are files "
            f"that end in {' '.join(EXTENSIONS)}"
        )
    log_strays(root, strays)
    return [root / name for name in images]


def find_names(root: Path) -> tuple[list[str], list[str]]:
    """Return the images in ``root`` and its sub-folders and its other entries, by their names relative to ``root``.

    Order and faults are those of `find_images`, but a folder without any image is none.
    """
    search = _Search(root)
    top = search.entries()
    folders = [top, *(folder for name in sorted(top.folders) for folder in search.walk(name))]
    return [name for folder in folders for name in folder.images], [
        name for folder in folders for name in folder.strays
    ]


class _Search:
    """Lists folders below ``root``, links followed, and none of them twice."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.times: dict[str, int] = {}
        # A link to a parent folder would lead back here, after a long search.
        self._seen = {_identity(os.stat(folder)): folder for folder in root.resolve().parents}

    def walk(self, top: str) -> list[_Folder]:
        """Return ``top`` and the folders below it, sorted as a whole: their order decides each image's index."""
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
            self.times[name] = self._check_first_visit(path).st_mtime_ns  # before the folder is listed
            with os.scandir(path) as listing:
                for entry in listing:
                    _kind_of(entry, folder).append(prefix + entry.name)
        except OSError as error:
            raise unlistable(path, error) from error
        folder.images.sort()
        folder.strays.sort()
        return folder

    def _check_first_visit(self, path: Path) -> os.stat_result:
        status = os.stat(path)
        other = self._seen.setdefault(_identity(status), path)
        if other is path:
            return status
        links = [step for end in (path, other) for step in (end, *end.parents) if self._root in step.parents]
        link = next((step for step in links if step.is_symlink()), None)
        if link is None:
            reason, remedy = "", "remove one of them"
        else:
            reason = f": {printable(link)} is a link to {printable(os.readlink(link))}"
            remedy = "remove the link"
        raise DataError(
            f"the images of a folder would count twice{reason}; {printable(path)} and {printable(other)} are the same "
            f"folder: {remedy}"
        )


def _kind_of(entry: os.DirEntry[str], folder: _Folder) -> list[str]:
    """Return the list of ``folder`` that ``entry`` belongs to; the disk is asked only about links."""
    if entry.name.startswith("."):
        return folder.strays
    if _leads_to_folder(entry):
        return folder.folders
    if not entry.name.lower().endswith(EXTENSIONS):
        return folder.strays
    if _is_special(entry):
        raise DataError(
            f"a pipe, socket or device is called like an image, but is neither a file nor a folder; "
            f"{printable(entry.path)}: remove it"
        )
    return folder.images


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to a folder without permission: whatever reads it reports that
        return False


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Return whether ``entry`` exists but is no file; a link to nowhere counts as an image that cannot be read."""
    try:
        return not entry.is_file() and os.path.exists(entry.path)
    except OSError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _check_exists(root: Path) -> None:
    try:
        if stat.S_ISDIR(os.stat(root).st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise unlistable(root, error) from error
    if not root.parent.is_dir():
        raise DataError(
            f"there is no folder {printable(root.parent)}; DATA: give a folder that holds train/ and val/, each with "
            "one folder of images per class"
        )
    try:
        present = listed(sorted(os.listdir(root.parent))) or "nothing"
    except OSError as error:
        raise unlistable(root.parent, error) from error
    raise DataError(
        f"there is no folder {printable(root.name)}/ (but {present}); {printable(root.parent)}: it needs train/ and "
        "val/, each with one folder of images per class"
    )


def unlistable(folder: Path, error: OSError) -> DataError:
    """Return the error to raise for a folder that cannot be listed."""
    return DataError(f"a folder cannot be listed: {error.strerror}; {printable(folder)}; mend its permissions")


def check_filled(
    root: DataPath, classes: Sequence[str], targets: Sequence[int], allow_empty_classes: bool, num_strays: int = 0
) -> None:
    """Raise DataError unless there are classes and images, and images of each class; see `scan_folder`."""
    if not classes or not len(targets):
        what = f"{len(classes)} class folders and no image in them"
        raise DataError(
            f"there are {what}, and {num_strays} other entries; {printable(root)}: it needs one folder "
            f"per class with images ({' '.join(EXTENSIONS)})"
        )
    filled = set(targets)
    empty = [name for target, name in enumerate(classes) if target not in filled]
    if not empty:
        return
    message = f"{len(empty)} of {len(classes)} class folders hold no image ({listed(empty)}); {printable(root)}"
    if not allow_empty_classes:
        raise DataError(f"{message}: put images ({' '.join(EXTENSIONS)}) there or remove the folders")
    logger.warning("%s", message)


def log_strays(root: Path, strays: list[str]) -> None:
    """Log how many of the entries of ``root`` are left out, and of which kinds."""
    if not strays:
        return
    kinds = Counter(_extension(path) for path in strays).most_common()
    logger.warning(
        "%d entries are not images and are left out (%s), such as %s; %s",
        len(strays),
        listed(f"{kind}: {count}" for kind, count in kinds),
        printable(strays[0]),
        printable(root),
    )


def _extension(path: str) -> str:
    name = os.path.basename(path)
    return "hidden" if name.startswith(".") else os.path.splitext(name)[1].lower() or "no extension"
