"""The labels of ImageNet-ReaL (Beyer et al. 2020): all classes seen in an image of ImageNet's validation set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from zoo.data.imagenet import NUM_CLASSES, imagenet_wnids
from zoo.data.prepare.validation_set import NUM_IMAGES, validation_number
from zoo.data.reading import read_bytes
from zoo.errors import DataError, brief, printable

_REMEDY = "give real.json of https://github.com/google-research/reassessed-imagenet"
_CONTENT = TypeAdapter(list[list[Annotated[int, Field(ge=0, lt=NUM_CLASSES)]]])


def read_real_labels(path: Path) -> list[frozenset[int]]:
    """Return the labels of the 50,000 images in the order of their numbers; some images have none.

    The file is ``real.json`` of https://github.com/google-research/reassessed-imagenet: a list of 50,000 lists of
    classes, 0 to 999. Raises DataError for a file that is anything else.
    """
    try:
        labels = _CONTENT.validate_json(read_bytes(path, "the labels"), strict=True)
    except DataError as error:
        raise DataError(f"{error}: {_REMEDY}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join([" ", *(f"[{index}]" for index in first["loc"])]).rstrip()
        raise DataError(
            f"these are no labels of ImageNet-ReaL: {brief(first['msg'])}{place}; {printable(path)}: {_REMEDY}"
        ) from error
    if len(labels) != NUM_IMAGES:
        raise DataError(
            f"there are labels of {len(labels):,} images, not of the {NUM_IMAGES:,} of ImageNet's validation set; "
            f"{printable(path)}: {_REMEDY}"
        )
    return [frozenset(classes) for classes in labels]


def real_labels_of(targets: Mapping[str, int | None], labels: Sequence[frozenset[int]]) -> dict[str, frozenset[int]]:
    """Return the labels of each image of ``targets``, paths with the class of their folder; some images have none.

    Raises DataError for a file that is not called as those of ImageNet's validation set, and for a target that is not
    the class of the image's folder: the network then numbers the classes in another way than ImageNet.
    """
    wnids = {wnid: number for number, wnid in enumerate(imagenet_wnids())}
    found = {}
    for path, target in targets.items():
        number = validation_number(os.fsencode(path))
        if number is None or not 1 <= number <= len(labels):
            raise DataError(
                f"{brief(path)} is no image of ImageNet's validation set, ILSVRC2012_val_00000001 to "
                f"ILSVRC2012_val_{NUM_IMAGES:08}; predictions: ImageNet-ReaL has labels for these alone"
            )
        folder = os.path.basename(os.path.dirname(path))
        if wnids.get(folder, target) != target:
            raise DataError(
                f"{brief(path)} was scored as class {target}, but {folder} is class {wnids[folder]} of ImageNet; "
                "predictions: give those of a network whose outputs are the classes of ImageNet in their order"
            )
        found[path] = labels[number - 1]
    return found
