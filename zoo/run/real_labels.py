"""The labels of ImageNet-ReaL (Beyer et al. 2020): all classes in each image of ImageNet's validation set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from zoo.data.imagenet import NUM_CLASSES, NUM_VAL_IMAGES, imagenet_wnids
from zoo.data.reading import read_text
from zoo.errors import DataError, truncate

_REMEDY = "give real.json of https://github.com/google-research/reassessed-imagenet"
_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")
_CONTENT = TypeAdapter(list[list[Annotated[int, Field(ge=0, lt=NUM_CLASSES)]]])


def read_real_labels(path: Path) -> list[frozenset[int]]:
    """Read the labels of the 50,000 images in the order of their numbers. Some images have none.

    The file is ``real.json`` of https://github.com/google-research/reassessed-imagenet: a list of 50,000 lists of
    classes, 0 to 999. Raises DataError for any other file.
    """
    try:
        labels = _CONTENT.validate_json(read_text(path, "the labels"), strict=True)
    except (DataError, ValidationError) as error:
        reason = error if isinstance(error, DataError) else truncate(error.errors()[0]["msg"])
        raise DataError(f"these are not the labels of ImageNet-ReaL: {reason}", path, _REMEDY) from error
    if len(labels) != NUM_VAL_IMAGES:
        what = f"there are labels of {len(labels):,} images, not of the {NUM_VAL_IMAGES:,} of ImageNet's validation set"
        raise DataError(what, path, _REMEDY)
    return [frozenset(classes) for classes in labels]


def real_labels_of(targets: Mapping[str, int | None], labels: Sequence[frozenset[int]]) -> dict[str, frozenset[int]]:
    """Return the labels of each image of ``targets`` (path -> scored class); some images have none.

    Raises DataError for a file name that is not an image of ImageNet's validation set. Raises DataError for a target
    that differs from the class of the folder, because the network then numbers the classes in another order.
    """
    wnids = {wnid: number for number, wnid in enumerate(imagenet_wnids())}
    found = {}
    for path, target in targets.items():
        match = _IMAGE_NAME.match(os.path.basename(path))
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(labels):
            names = f"ILSVRC2012_val_00000001 to ILSVRC2012_val_{NUM_VAL_IMAGES:08}"
            what = f"{truncate(path)} is not an image of ImageNet's validation set, {names}"
            raise DataError(what, "predictions", "ImageNet-ReaL has labels for these images only")
        folder = os.path.basename(os.path.dirname(path))
        if wnids.get(folder, target) != target:
            what = f"{truncate(path)} was scored as class {target}, but {folder} is class {wnids[folder]} of ImageNet"
            remedy = "give predictions of a network whose outputs are the classes of ImageNet in their order"
            raise DataError(what, "predictions", remedy)
        found[path] = labels[number - 1]
    return found
