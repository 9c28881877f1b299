"""Confusion matrices of classifications, in images, and of segmentations, in pixels, and their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.data.dataset import Batch

MAX_CLASSES = 2000  # a classification with more classes has no matrix; this one takes 32 MB


def confusion_counts(labels: Tensor, predictions: Tensor, num_classes: int, ignore_label: int) -> Tensor:
    """Return the confusion matrix in pixels, (C, C), int64: rows are labels, columns predictions.

    Ignores pixels with label ``ignore_label``. All other labels must be below C; the readers of label maps ensure this.
    Does not synchronize with the device.
    """
    place = labels * num_classes + predictions
    place.masked_fill_(labels == ignore_label, num_classes**2)  # one extra cell after the matrix
    counts = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=place.device)
    # torch.bincount would synchronize with the device to find the largest index.
    counts.scatter_add_(0, place.flatten(), counts.new_ones(()).expand(place.numel()))
    return counts[:-1].view(num_classes, num_classes)


class ConfusionTally:
    """Counts the labels and the most likely classes of the images that a validation scores.

    Args:
    - `num_classes`: number of classes, C.

    Attributes:
    - `counts`: (C, C), int64: rows are labels, columns predictions.
    """

    def __init__(self, num_classes: int) -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Count a batch with logits (N, C), whose best class is the first of `Tensor.topk`, as for the accuracies."""
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices[:, 0]
        targets = batch.targets.to(logits.device)
        self.counts = self.counts.to(logits.device)
        self.counts += confusion_counts(targets, best, len(self.counts), ignore_label=-1)


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """Scores of a confusion matrix, in percent; NaN if no pixel has a label. For a classification, pixels are images.

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
        """Accuracy of the pixels of each class, also called recall; None for a class without labeled pixels."""
        rows = zip(self.counts.diagonal().tolist(), self.counts.sum(1).tolist(), strict=True)
        return [100 * hit / labeled if labeled else None for hit, labeled in rows]

    @property
    def precision(self) -> list[float | None]:
        """Share of the predictions of each class that are correct; None for a class that is never predicted."""
        columns = zip(self.counts.diagonal().tolist(), self.counts.sum(0).tolist(), strict=True)
        return [100 * hit / predicted if predicted else None for hit, predicted in columns]

    @property
    def f1(self) -> list[float | None]:
        """Harmonic mean of precision and class accuracy; None for a class that is neither labeled nor predicted."""
        hits = self.counts.diagonal().tolist()
        sums = (self.counts.sum(0) + self.counts.sum(1)).tolist()
        return [200 * hit / total if total else None for hit, total in zip(hits, sums, strict=True)]

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
