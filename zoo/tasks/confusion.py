"""The confusion matrix of a segmentation, and the scores that are made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def confusion_counts(labels: Tensor, predictions: Tensor, num_classes: int, ignore_label: int) -> Tensor:
    """Return how many pixels of each class have which prediction, (C, C), int64: rows are labels, columns predictions.

    Pixels whose label is ``ignore_label`` are left out. All other labels have to be below C, as all predictions are,
    which the reading of the label maps ensures. Nothing waits for the device.
    """
    place = labels * num_classes + predictions
    place.masked_fill_(labels == ignore_label, num_classes**2)  # a place behind the matrix
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=place.device)
    # torch.bincount would ask the device for the largest place, and wait for the answer.
    counts.scatter_add_(0, place.flatten(), counts.new_ones(()).expand(place.numel()))
    return counts[:-1].view(num_classes, num_classes)


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """The scores of a confusion matrix, all in percent, and NaN if no pixel has a label.

    A class that neither labels nor predictions have is in no mean over classes. One that is predicted and never
    labelled has an IoU of 0, as in the scripts of Cityscapes and in mmsegmentation (detectron2 leaves it out).

    Args:
    - `counts`: (C, C), int64, on the CPU: rows are labels, columns predictions. It is the sum over all images, as the
      mean of the images' scores would be another number.
    """

    counts: Tensor

    @property
    def pixels(self) -> int:
        """Number of pixels that have a label."""
        return int(self.counts.sum())

    @property
    def iou(self) -> list[float | None]:
        """Intersection over union of labels and predictions for each class, None for one that is in neither."""
        hits = self.counts.diagonal().tolist()
        unions = (self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()).tolist()
        return [100 * hit / union if union else None for hit, union in zip(hits, unions, strict=True)]

    @property
    def miou(self) -> float:
        """Mean of `iou` over the classes that have one."""
        return _mean([iou for iou in self.iou if iou is not None])

    @property
    def pixel_accuracy(self) -> float:
        """Pixels whose prediction is their label."""
        return 100 * int(self.counts.diagonal().sum()) / (self.pixels or math.nan)

    @property
    def class_accuracy(self) -> list[float | None]:
        """The pixel accuracy among the pixels of each class, None for one that no pixel has."""
        rows = zip(self.counts.diagonal().tolist(), self.counts.sum(1).tolist(), strict=True)
        return [100 * hit / labelled if labelled else None for hit, labelled in rows]

    @property
    def mean_class_accuracy(self) -> float:
        """Mean of `class_accuracy` over the classes that have one."""
        return _mean([accuracy for accuracy in self.class_accuracy if accuracy is not None])

    @property
    def frequency_weighted_iou(self) -> float:
        """Mean of `iou`, each class weighted with its number of labelled pixels."""
        labelled = self.counts.sum(1).tolist()
        weighted = [iou * pixels for iou, pixels in zip(self.iou, labelled, strict=True) if iou is not None]
        return math.fsum(weighted) / (self.pixels or math.nan)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / (len(values) or math.nan)
