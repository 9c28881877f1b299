"""Scores of a confusion matrix equal a manual count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.synchronization import no_synchronization
from zoo.tasks.confusion import ConfusionMatrix, confusion_counts

IGNORE = 255


def _pixels(num_classes: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Labels, some of them to be ignored, and predictions."""
    generator = torch.Generator().manual_seed(num_classes)
    labels = torch.randint(num_classes, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORE
    return labels, torch.randint(num_classes, shape, generator=generator)


def _counted(labels: Tensor, predictions: Tensor, num_classes: int) -> np.ndarray:
    """Count pixel by pixel."""
    counts = np.zeros((num_classes, num_classes), dtype=np.int64)
    for label, prediction in zip(labels.flatten().tolist(), predictions.flatten().tolist(), strict=True):
        if label != IGNORE:
            counts[label, prediction] += 1
    return counts


@pytest.mark.parametrize(("num_classes", "shape"), [(1, (1, 1)), (4, (2, 7, 5)), (19, (3, 16, 9)), (200, (40, 41))])
def test_every_labeled_pixel_is_counted_once(num_classes: int, shape: tuple[int, ...]) -> None:
    labels, predictions = _pixels(num_classes, *shape)
    before = labels.clone()
    counts = confusion_counts(labels, predictions, num_classes, IGNORE)
    assert counts.dtype == torch.int64
    assert np.array_equal(counts.numpy(), _counted(labels, predictions, num_classes))
    assert torch.equal(labels, before)


def test_scores_equal_manual_count() -> None:
    """Class 0: 6 of 8 pixels right, 1 pixel of class 1 taken for it. Class 3 is predicted twice, class 2 is nowhere."""
    matrix = ConfusionMatrix(torch.tensor([[6, 1, 0, 1], [1, 2, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]))
    assert matrix.iou == [100 * 6 / 9, 100 * 2 / 5, None, 0.0]
    assert matrix.miou == pytest.approx((100 * 6 / 9 + 40) / 3)
    assert matrix.pixel_accuracy == pytest.approx(100 * 8 / 12)
    assert matrix.class_accuracy == [75.0, 50.0, None, None]
    assert matrix.precision == [pytest.approx(100 * 6 / 7), pytest.approx(100 * 2 / 3), None, 0.0]
    assert matrix.f1 == [pytest.approx(100 * 2 * 6 / 15), pytest.approx(100 * 2 * 2 / 7), None, 0.0]
    assert matrix.mean_class_accuracy == 62.5
    assert matrix.frequency_weighted_iou == pytest.approx((8 * 600 / 9 + 4 * 40) / 12)
    assert matrix.pixels == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counting_never_synchronizes_with_device() -> None:
    labels, predictions = _pixels(5, 30, 20)
    expected = confusion_counts(labels, predictions, 5, IGNORE)
    labels, predictions = labels.cuda(), predictions.cuda()
    confusion_counts(labels, predictions, 5, IGNORE)
    with no_synchronization():
        counts = confusion_counts(labels, predictions, 5, IGNORE)
    assert torch.equal(counts.cpu(), expected)
