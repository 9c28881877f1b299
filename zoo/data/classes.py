"""The names of the classes that a network tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from zoo.errors import DataError, listed, printable

NUM_IMAGENET = 1000


def class_names(num_classes: int, source: Path | None = None, known: Sequence[str] | None = None) -> list[str]:
    """Return a name for each class of a network, in the order of its outputs.

    ``source``: a folder with one folder per class, as the network was trained on (DATA/train), or a text file with one
    name per line. Without it the names that are ``known`` from the network's weights file, numbers for those that it
    does not name; without either the names of ImageNet for 1000 classes, and numbers for any other count. wnids of all
    ImageNet are replaced by its names. Raises DataError unless the source has as many names as the network has classes.
    """
    if source is None:
        of_imagenet = num_classes == NUM_IMAGENET and tuple(known or imagenet_wnids()) == imagenet_wnids()
        if of_imagenet:
            return imagenet_names()
        return [*(known or ()), *(str(index) for index in range(len(known or ()), num_classes))]
    names = _names_in(source)
    if len(names) != num_classes:
        raise DataError(
            f"there are {len(names)} class names ({listed(names, 3)}) but the network has {num_classes} classes; "
            f"{printable(source)}: give the folder with the class folders (DATA/train), or a file with one name per "
            "line"
        )
    return names


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the WordNet ids of the 1000 ImageNet classes, which are their folders' names, in the outputs' order."""
    return tuple(files("zoo").joinpath("data", "imagenet_wnids.txt").read_text(encoding="ascii").split())


def imagenet_names() -> list[str]:
    """Return the names of the 1000 ImageNet classes, as torchvision has them; nothing is downloaded."""
    from torchvision.models import ResNet50_Weights  # here: it imports all of torchvision's networks

    return list(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])


def _names_in(source: Path) -> list[str]:
    try:
        if source.is_dir():  # in the order in which the data set numbers them
            return sorted(path.name for path in source.iterdir() if path.is_dir() and not path.name.startswith("."))
        return [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DataError(f"the class names cannot be read: {reason}; {printable(source)}") from error
