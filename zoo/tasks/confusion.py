"""Confusion matrix of a segmentation, and its scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def confusion_counts(labels: Tensor, predictions: Tensor, num_classes: int, ignore_label: int) -> Tensor:
    """Return the confusion matrix in pixels, (C, C), int64: rows are labels, columns predictions.

    Ignores pixels with label ``ignore_label``. All other labels must be below C, which the label map readers ensure.
    Does not synchronize with the device.
    """
    place = labels * num_classes + predictions
    place.masked_fill_(labels == ignore_label, num_classes**2)  # one extra cell behind the matrix
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=place.device)
    # torch.bincount would synchronize with the device to find the largest index.
    counts.scatter_add_(0, place.flatten(), counts.new_ones(()).expand(place.numel()))
    return counts[:-1].view(num_classes, num_classes)


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """Scores of a confusion matrix, in percent; NaN if no pixel has a label.

    Means over classes exclude classes that are neither labeled nor predicted. A class that is predicted but never
    labeled has an IoU of 0, as in the Cityscapes scripts and in mmsegmentation (detectron2 excludes it).

    Args:
    - `counts`: (C, C), int64, on the CPU, summed over all images: rows are labels, columns predictions.
    """

    counts: Tensor

    @property
    def pixels(self) -> int:
        """Number of labeled pixels."""
        return int(self.counts.sum())

    @property
    def iou(self) -> list[float | None]:
        """Intersection over union of each class; None for a class that is neither labeled nor predicted."""
        hits = self.counts.diagonal().tolist()
        unions = (self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()).tolist()
        return [100 * hit / union if union else None for hit, union in zip(hits, unions, strict=True)]

    @property
    def miou(self) -> float:
        """Mean of `iou` over the classes for which it is not None."""
        return _mean([iou for iou in self.iou if iou is not None])

    @property
    def pixel_accuracy(self) -> float:
        """Share of labeled pixels that are predicted correctly."""
        return 100 * int(self.counts.diagonal().sum()) / (self.pixels or math.nan)

    @property
    def class_accuracy(self) -> list[float | None]:
        """Pixel accuracy of each class; None for a class without labeled pixels."""
        rows = zip(self.counts.diagonal().tolist(), self.counts.sum(1).tolist(), strict=True)
        return [100 * hit / labeled if labeled else None for hit, labeled in rows]

    @property
    def mean_class_accuracy(self) -> float:
        """Mean of `class_accuracy` over the classes for which it is not None."""
        return _mean([accuracy for accuracy in self.class_accuracy if accuracy is not None])

    @property
    def frequency_weighted_iou(self) -> float:
        """Mean of `iou`, weighted with the number of labeled pixels of each class."""
        labeled = self.counts.sum(1).tolist()
        weighted = [iou * pixels for iou, pixels in zip(self.iou, labeled, strict=True) if iou is not None]
        return math.fsum(weighted) / (self.pixels or math.nan)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / (len(values) or math.nan)
