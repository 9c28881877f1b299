"""Finding the pictures of a folder with one sub-folder per class, in torchvision's order."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from zoo.errors import DataError

logger = logging.getLogger(__name__)

MAX_NAMED = 10


@dataclass
class Scan:
    """What lies in a folder: class names, and per picture its name (relative, as bytes) and class index."""

    root: Path
    classes: list[str]
    names: list[bytes] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)


def scan_folder(root: Path, allow_empty_classes: bool = False) -> Scan:
    """Return the pictures below ``root``, sorted by class, folder and name as torchvision sorts them.

    A picture is a file with a picture's extension in any case. Other files, and whatever starts with a dot, are
    left out and logged with their number. Raises DataError when ``root`` is missing or cannot be listed, holds
    no class folder or no picture, or has a class without a picture (logged only with ``allow_empty_classes``,
    as a validation set may be a part of one).
    """
    _check_exists(root)
    entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    is_class = [entry.is_dir() and not entry.name.startswith(".") for entry in entries]
    found = Scan(root, [entry.name for entry, good in zip(entries, is_class, strict=True) if good])
    found.strays += [entry.name for entry, good in zip(entries, is_class, strict=True) if not good]
    for target, name in enumerate(found.classes):
        _scan_class(found, name, target)
    _check_filled(found, allow_empty_classes)
    _log_strays(found)
    return found


def _check_exists(root: Path) -> None:
    if root.is_dir():
        return
    if not root.parent.is_dir():
        raise DataError(
            f"there is no folder {root.parent}; DATA: give a folder that holds train/ and val/, each with one "
            "folder of pictures per class"
        )
    there = ", ".join(sorted(path.name for path in root.parent.iterdir())[:MAX_NAMED]) or "nothing"
    raise DataError(
        f"there is no folder {root.name}/ (but {there}); {root.parent}: it needs train/ and val/, each with one "
        "folder of pictures per class"
    )


def _scan_class(found: Scan, name: str, target: int) -> None:
    # Sorted as a whole, like torchvision: the order decides which picture has which index.
    for folder, subfolders, files in sorted(_walk(found.root / name), key=lambda step: step[0]):
        below = os.path.relpath(folder, found.root)
        found.strays += [os.path.join(below, hidden) for hidden in subfolders if hidden.startswith(".")]
        for file in sorted(files):
            path = os.path.join(below, file)
            if file.startswith(".") or not file.lower().endswith(IMG_EXTENSIONS):
                found.strays.append(path)
            else:
                found.names.append(os.fsencode(path))
                found.targets.append(target)


def _walk(top: Path) -> list[tuple[str, list[str], list[str]]]:
    steps = []
    for folder, subfolders, files in os.walk(top, followlinks=True, onerror=_refuse):
        steps.append((folder, list(subfolders), files))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
    return steps


def _refuse(error: OSError) -> None:
    # os.walk would leave out what it cannot list without a word.
    raise DataError(f"a folder cannot be listed: {error.strerror}; {error.filename}; mend its permissions") from error


def _check_filled(found: Scan, allow_empty_classes: bool) -> None:
    if not found.classes or not found.names:
        what = f"{len(found.classes)} class folders and no picture in them"
        raise DataError(
            f"there are {what}, and {len(found.strays)} other entries; {found.root}: it needs one folder per "
            f"class with pictures ({' '.join(IMG_EXTENSIONS)})"
        )
    filled = set(found.targets)
    empty = [name for target, name in enumerate(found.classes) if target not in filled]
    if not empty:
        return
    message = f"{len(empty)} of {len(found.classes)} class folders hold no picture ({_some(empty)}); {found.root}"
    if not allow_empty_classes:
        raise DataError(f"{message}: put pictures ({' '.join(IMG_EXTENSIONS)}) there or remove the folders")
    logger.warning("%s", message)


def _log_strays(found: Scan) -> None:
    if not found.strays:
        return
    kinds = Counter(_kind(path) for path in found.strays).most_common()
    counts = ", ".join(f"{kind}: {count}" for kind, count in kinds)
    logger.warning(
        "%d entries are not pictures and are left out (%s), such as %s; %s",
        len(found.strays),
        counts,
        found.strays[0],
        found.root,
    )


def _kind(path: str) -> str:
    name = os.path.basename(path)
    return "hidden" if name.startswith(".") else os.path.splitext(name)[1].lower() or "no extension"


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
