"""Predictions of single images are the softmax's best classes."""

from __future__ import annotations

import pytest
import torch

from zoo.tasks.prediction import best_classes


def test_probabilities_are_sorted_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ((classes, probabilities),) = best_classes(logits, top=2)
    assert classes == (1, 3)
    assert probabilities == pytest.approx(logits.double().softmax(1)[0, [1, 3]].tolist())
    assert best_classes(torch.zeros(1, 1000))[0][0] == (0, 1, 2, 3, 4)
