"""Classes of all images without reading an image, and the weights of the loss and of sampling computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from zoo.errors import DataError, join_names

ATTRIBUTES = ("targets", "labels", "_labels", "samples", "imgs", "_samples")  # attributes of torchvision's data sets
BALANCED = "balanced"
MAX_WEIGHTS = 2**24  # limit of torch.multinomial


def targets_of(dataset: Any) -> np.ndarray | None:
    """Return the label of each item of a map-style data set, (n,) int64, without reading an item; None if unknown.

    Labels are an attribute, as torchvision's data sets have it, a column "label" of the package datasets, or the second
    tensor of a TensorDataset; also inside Subset and ConcatDataset. A ``target_transform`` makes them unknown.
    """
    if isinstance(dataset, Subset):
        inner = targets_of(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [found for part in dataset.datasets if (found := targets_of(part)) is not None]
        return np.concatenate(parts) if len(parts) == len(dataset.datasets) else None
    if isinstance(dataset, TensorDataset):
        return _as_targets(dataset.tensors[1], len(dataset)) if len(dataset.tensors) == 2 else None
    if getattr(dataset, "target_transform", None) is not None:
        return None
    if "label" in (getattr(dataset, "column_names", None) or ()):
        return _as_targets(dataset["label"][:], len(dataset))
    known = (_as_targets(getattr(dataset, name, None), len(dataset)) for name in ATTRIBUTES)
    return next((targets for targets in known if targets is not None), None)


def _as_targets(values: Any, count: int) -> np.ndarray | None:
    """Return labels, or the second entries of pairs, as an array; None for anything but ``count`` integers."""
    if not isinstance(values, (list, tuple, np.ndarray, Tensor)) or len(values) != count:
        return None
    if isinstance(values, (list, tuple)) and all(isinstance(each, tuple) and len(each) == 2 for each in values):
        values = [label for _, label in values]
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "iu" else None


def class_weights(setting: Sequence[float] | str, targets: Callable[[], np.ndarray], num_classes: int) -> Tensor:
    """Return the weight of each class in the loss, (num_classes,) float32.

    "balanced": n / (C * n_c) for a class with n_c of n images, where C classes have images; 0 without images. The mean
    over the images is then 1. ``targets`` returns the class of each image.
    """
    if setting != BALANCED:
        return torch.tensor(setting)
    counts = np.bincount(targets(), minlength=num_classes)
    share = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return torch.from_numpy(np.where(counts, share, 0.0)).float()


def weighted_order(
    setting: Sequence[float] | str, targets: np.ndarray, num_classes: int, where: object
) -> Callable[[torch.Generator], Tensor]:
    """Return a function that draws the images of an epoch, (n,) int64, with replacement, as WeightedRandomSampler.

    ``setting``: the relative frequency of an image of each class; "balanced": one divided by the number of the images
    of its class, so that all classes are drawn equally often. Raises DataError if no image can be drawn.
    """
    counts = np.bincount(targets, minlength=num_classes)
    of_class = 1 / np.maximum(counts, 1) if setting == BALANCED else np.array(setting)
    weights = torch.from_numpy(of_class[targets])
    if not weights.sum() > 0:
        drawn = join_names(np.flatnonzero(of_class).tolist())
        what = f"no image is of a class with a weight above 0, which are {drawn}"
        raise DataError(what, where, "set input.sampling_train for the classes of the data")
    if len(weights) > MAX_WEIGHTS:
        what = f"input.sampling_train draws from at most {MAX_WEIGHTS:,} images, and there are {len(weights):,}"
        raise DataError(what, where, "remove the key, and set regularization.class_weights instead")
    return lambda generator: torch.multinomial(weights, len(weights), replacement=True, generator=generator)
