"""Tells whether a folder is the ImageNet validation set, and describes it in any case."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zoo.data.scan import Scan, scan_folder
from zoo.errors import DataError, listed, printable

NUM_IMAGES, NUM_CLASSES = 50_000, 1000
CLASS_NAME = re.compile(r"n\d{8}")
IMAGE_NAME = re.compile(rb"ILSVRC2012_val_(\d{8})(?!\d)")
ARCHIVE = "ILSVRC2012_img_val.tar (md5 29b22e2961454d5413ddabcf34fc5622)"


@dataclass(frozen=True)
class ValidationSet:
    """The images below ``folder``.

    Args:
    - `folder`: where they are.
    - `images`: their number.
    - `classes`: the number of their classes.
    - `digest`: sha256 of their names and sizes.
    - `difference`: what distinguishes them from the ImageNet validation set, None if they are that set.
    - `fault`: why there are no images, None if there are; if it is given, all other fields are empty.
    """

    folder: str
    images: int = 0
    classes: int = 0
    digest: str | None = None
    difference: str | None = None
    fault: str | None = None

    @property
    def is_imagenet(self) -> bool:
        """Whether these are the 50,000 images that scores are published for."""
        return self.fault is None and self.difference is None


def describe_validation_set(data: Path) -> ValidationSet:
    """Return a description of ``data``/val. If the folder cannot be used, ``fault`` says why.

    ImageNet is recognised by names alone: 1000 folders called like n01440764 with 50 images each, whose files are
    called ILSVRC2012_val_00000001 to ILSVRC2012_val_00050000.
    """
    folder = data / "val"
    try:
        scan = scan_folder(folder, allow_empty_classes=True)
        return ValidationSet(str(folder), len(scan.names), len(scan.classes), _digest(scan), _difference(scan))
    except DataError as error:
        return ValidationSet(str(folder), fault=str(error))


def expected_layout(data: Path) -> str:
    """Return where the ImageNet validation set would have to be, and where it comes from."""
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
        return f"class folders are not called like n01440764: {listed(strange, 3)}"
    if set(Counter(scan.targets).values()) != {NUM_IMAGES // NUM_CLASSES}:
        return f"not every class has {NUM_IMAGES // NUM_CLASSES} images"
    numbers = [IMAGE_NAME.match(os.path.basename(name)) for name in scan.names]
    if {int(match[1]) for match in numbers if match} != set(range(1, NUM_IMAGES + 1)):
        return f"its files are not called ILSVRC2012_val_00000001 to ILSVRC2012_val_{NUM_IMAGES:08}"
    return None


def _digest(scan: Scan) -> str:
    """Return the sha256 of the names and sizes; to read 50,000 images would take as long as scoring them."""
    digest = hashlib.sha256()
    for name in scan.names:
        path = scan.root / os.fsdecode(name)
        try:
            digest.update(name + b"\0%d\n" % os.stat(path).st_size)
        except OSError as error:  # a link to nowhere
            raise DataError(f"an image cannot be read: {error.strerror}; {printable(path)}") from error
    return digest.hexdigest()
