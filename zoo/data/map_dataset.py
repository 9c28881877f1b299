"""Data set objects in place of a folder: any map-style ``Dataset`` of (image, label) or {"image", "label"}."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from zoo.data.dataset import ImageDataset, Sample
from zoo.data.identity import object_digests
from zoo.data.reading import delivered
from zoo.data.seeding import seed_global_generators
from zoo.data.targets import targets_of
from zoo.data.transforms.classification import Drawn, Transform, as_pixels
from zoo.errors import DataError, join_names, shorten_repr
from zoo.tables import counted

MAP_LABELS = "map the labels to one order of the classes (target_transform), and set the same attribute classes"


@dataclass(frozen=True)
class Datasets:
    """The data of a run as objects: a training set, and a validation set or None.

    Raises DataError unless both are map-style, have a length and name the same classes, if they name any.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None = None

    def __post_init__(self) -> None:
        for dataset in (self.train, self.val):
            if dataset is not None:
                _check_map_style(dataset)
        names, val_names = class_names_of(self.train), class_names_of(self.val)
        if names and val_names and names != val_names:
            raise DataError(
                f"it has the classes {join_names(val_names, 3)}, and the training data {join_names(names, 3)}",
                f"the validation data {type(self.val).__name__}",
                MAP_LABELS,
            )

    def __str__(self) -> str:
        """Return the types of the two objects, for messages."""
        return " and ".join(type(each).__name__ for each in (self.train, self.val) if each is not None)


class MapDataset(ImageDataset):
    """Wraps a map-style data set of (image, label) so that its own augmentation is repeatable.

    Seeds the global generators of random, numpy and torch for each item while it is read. Items must not use other
    random numbers. Raises DataError if the data set names more classes than there are outputs.

    Args:
    - `dataset`: index -> (image, label) or {"image": image, "label": label}. A floating-point tensor (C, H, W) is an
      input of the network and not changed. PIL images, and uint8 arrays or tensors, are passed to ``transform``.
    - `transform`: image -> tensor.
    - `num_classes`: number of outputs, greater than all labels; None if unknown.
    - `seed`: seed of the augmentation.
    """

    class_kind = "classes"
    remedy = "correct the item, or leave it out"

    def __init__(
        self,
        dataset: Any,
        transform: Transform,
        num_classes: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        names, root = class_names_of(dataset), Path(type(dataset).__name__)
        if num_classes is not None and len(names) > num_classes:
            what = f"it names {counted(len(names), 'class')} but the network has {counted(num_classes, 'output')}"
            raise DataError(what, root, f"give the network {counted(len(names), 'class')}")
        super().__init__(root, names, np.arange(len(dataset)), seed=seed)
        self.dataset = dataset
        self.transform = transform
        self.num_classes = num_classes
        self._outputs: list[int] | None = None
        self._listed: np.ndarray | None = None  # from an attribute; the labels of items must agree

    def remap_targets(self, numbers: Sequence[int]) -> None:
        """Set the target of class i to ``numbers[i]``, before any image is drawn."""
        self._outputs = list(numbers)

    def file_name(self, index: int) -> str:
        """Return the name of an item in messages."""
        return f"item {index} of {self.root}"

    def targets(self) -> np.ndarray:
        """Return the class of each item, see `targets_of`. Raises DataError if it is unknown."""
        found = targets_of(self.dataset)
        if found is None:
            what = "the labels of its items are not known before the items are read"
            raise DataError(what, self.root, "give it an attribute targets, a list of the labels")
        self._listed = np.array([self._target(label, self.file_name(index)) for index, label in enumerate(found)])
        return self._listed

    def digests(self) -> dict[str, str]:
        """Return the digests of the names of the classes and of the attributes of the data set."""
        return {**super().digests(), **object_digests(self.dataset)}

    def _draw(self, index: int, epoch: int, generator: Random) -> Sample:
        name = self.file_name(index)

        def read() -> Any:
            # A copy, so that ``transform`` draws the same numbers as for the images of a folder.
            with seed_global_generators(copy(generator)):
                return self.dataset[index]

        try:
            item = delivered(read, name)
        except OSError as error:  # Pillow also raises it for a damaged file
            raise DataError(f"it cannot be read ({error})", name) from error
        if isinstance(item, Mapping) and {"image", "label"} <= item.keys():
            item = item["image"], item["label"]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            what = f"it is {shorten_repr(item)}, not a pair (image, label) or a dict with these keys"
            raise DataError(what, name)
        image, target = item[0], self._target(item[1], name)
        if self._listed is not None and target != self._listed[index]:
            what = f"its label is {target}, and {self._listed[index]} in the attribute that lists the labels"
            raise DataError(what, name, "correct the attribute")
        if isinstance(image, Tensor) and image.is_floating_point():
            return Sample(Drawn(image), target, name)
        return Sample(self.transform.draw(as_pixels(image), generator), target, name)

    def _target(self, label: Any, name: str) -> int:
        try:
            target = operator.index(label)  # accepts 0-d arrays and tensors too
        except TypeError:
            raise DataError(f"its label is {shorten_repr(label)}, not an integer", name) from None
        if self._outputs is not None and not 0 <= target < len(self._outputs):
            raise DataError(
                f"its label is {target}, but the data set names {counted(len(self._outputs), 'class')}", name
            )
        if target < 0 or (self.num_classes is not None and target >= self.num_classes):
            limit = (
                "negative" if self.num_classes is None else f"but the network has {counted(self.num_classes, 'output')}"
            )
            what = f"its label is {target}, {limit}"
            raise DataError(what, name, "labels count from 0 and are smaller than the number of outputs")
        return target if self._outputs is None else self._outputs[target]


def class_names_of(dataset: Dataset[Any] | None) -> list[str]:
    """Return the attribute ``classes`` of a data set, as in torchvision; empty without unique names.

    A Subset has the names of its data set. A ConcatDataset has the names of its parts. Raises DataError if they differ.
    """
    found = getattr(dataset, "classes", None)
    if found is None and isinstance(dataset, Subset):
        return class_names_of(dataset.dataset)
    if found is None and isinstance(dataset, ConcatDataset):
        return _names_of_parts(dataset)
    if not isinstance(found, Sequence):
        return []
    names = [name if isinstance(name, str) else ", ".join(map(str, name)) for name in found]
    return names if len(set(names)) == len(names) else []


def _names_of_parts(dataset: ConcatDataset[Any]) -> list[str]:
    """Return the class names of the parts; empty if no part has names. Raises DataError if their names differ."""
    names: list[str] = []
    for part in filter(None, map(class_names_of, dataset.datasets)):
        if names and part != names:
            what = f"its parts have the classes {join_names(names, 3)} and {join_names(part, 3)}"
            raise DataError(what, type(dataset).__name__, MAP_LABELS)
        names = part
    return names


def _check_map_style(dataset: Any) -> None:
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_map or isinstance(dataset, IterableDataset) or len(dataset) == 0:
        what = "it is neither a folder nor a map-style data set"
        raise DataError(what, type(dataset).__name__, "give a map-style Dataset, with __len__ and __getitem__")
