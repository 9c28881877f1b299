"""Describing a validation folder, and recognizing the ImageNet validation set."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zoo.data.imagenet import NUM_CLASSES
from zoo.data.scan import Scan, scan_folder
from zoo.errors import DataError, join_names

NUM_IMAGES = 50_000
CLASS_NAME = re.compile(r"n\d{8}")
IMAGE_NAME = re.compile(rb"ILSVRC2012_val_(\d{8})(?!\d)")
ARCHIVE = "ILSVRC2012_img_val.tar (md5 29b22e2961454d5413ddabcf34fc5622)"


@dataclass(frozen=True)
class ValidationSet:
    """The images of a validation folder.

    Args:
    - `folder`: the folder.
    - `images`: number of images.
    - `classes`: number of classes.
    - `per_class`: smallest and largest number of images of a class.
    - `digest`: sha256 of the names and sizes of the images.
    - `difference`: the difference from the ImageNet validation set; None if there is none.
    - `is_part`: whether the images are, by their names, a proper subset of the ImageNet validation set.
    - `fault`: why the folder is unusable; the other fields then have their defaults.
    """

    folder: str
    images: int = 0
    classes: int = 0
    per_class: tuple[int, int] = (0, 0)
    digest: str | None = None
    difference: str | None = None
    is_part: bool = False
    fault: str | None = None

    @property
    def is_imagenet(self) -> bool:
        """Whether these are the 50,000 images of the published scores."""
        return self.fault is None and self.difference is None


def describe_validation_set(data: Path) -> ValidationSet:
    """Return a description of ``data``/val, with a ``fault`` if the folder is unusable.

    ImageNet is recognized by names and counts alone: 1000 folders named like n01440764 with 50 images each, whose files
    are named ILSVRC2012_val_00000001 to ILSVRC2012_val_00050000. Files are not opened.
    """
    folder = data / "val"
    try:
        scan = scan_folder(folder, allow_empty_classes=True)
        per_class = Counter(scan.targets)
        counts = [per_class[target] for target in range(len(scan.classes))]
        return ValidationSet(
            str(folder),
            len(scan.names),
            len(scan.classes),
            (min(counts), max(counts)),
            _digest(scan),
            _difference(scan),
            _is_part(scan),
        )
    except DataError as error:
        return ValidationSet(str(folder), fault=str(error))


def expected_layout(data: Path) -> str:
    """Return instructions on where to put the ImageNet validation set and where to get it."""
    return (
        f"the ImageNet validation set is expected as {data / 'val' / 'n01440764' / 'ILSVRC2012_val_00000293.JPEG'} and "
        f"so on: {NUM_IMAGES:,} images, 50 in each of {NUM_CLASSES} class folders. It cannot be fetched without an "
        f"account at https://image-net.org: it is {ARCHIVE}, unpacked and sorted into class folders"
    )


def _difference(scan: Scan) -> str | None:
    sizes = (len(scan.names), len(scan.classes))
    if sizes != (NUM_IMAGES, NUM_CLASSES):
        return f"it has {sizes[0]:,} images in {sizes[1]:,} classes, not {NUM_IMAGES:,} in {NUM_CLASSES:,}"
    strange = [name for name in scan.classes if not CLASS_NAME.fullmatch(name)]
    if strange:
        return f"class folders are not named like n01440764: {join_names(strange, 3)}"
    if set(Counter(scan.targets).values()) != {NUM_IMAGES // NUM_CLASSES}:
        return f"not every class has {NUM_IMAGES // NUM_CLASSES} images"
    if set(map(validation_number, scan.names)) != set(range(1, NUM_IMAGES + 1)):
        return f"its files are not named ILSVRC2012_val_00000001 to ILSVRC2012_val_{NUM_IMAGES:08}"
    return None


def _is_part(scan: Scan) -> bool:
    numbers = set(map(validation_number, scan.names))
    is_subset = len(numbers) == len(scan.names) < NUM_IMAGES and numbers <= set(range(1, NUM_IMAGES + 1))
    return is_subset and all(map(CLASS_NAME.fullmatch, scan.classes))


def validation_number(name: bytes) -> int | None:
    """Return the number in the file name of an image of the ImageNet validation set; None for any other name."""
    match = IMAGE_NAME.match(os.path.basename(name))
    return int(match[1]) if match else None


def _digest(scan: Scan) -> str:
    """Return the sha256 of names and sizes. Reading 50,000 images would take as long as scoring them."""
    digest = hashlib.sha256()
    for name in scan.names:
        path = scan.root / os.fsdecode(name)
        try:
            digest.update(name + b"\0%d\n" % os.stat(path).st_size)
        except OSError as error:  # a link to nowhere
            raise DataError(f"an image cannot be read: {error.strerror}", path) from error
    return digest.hexdigest()
