"""Top-1 and top-5 equal a manual count, and only the training loss is smoothed."""

from __future__ import annotations

import math
from statistics import pstdev

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.synchronization import no_synchronization
from zoo.config.parse import parse_experiment
from zoo.engine._meters import Meter, Reading
from zoo.engine._task import Task
from zoo.tasks import task_of
from zoo.tasks.classification import standard_error
from zoo.tasks.prediction import best_classes

SMOOTHING = 0.1
TASK = task_of(parse_experiment({"optimizer": {"label_smoothing": SMOOTHING}}, "test"))


def _logits_with_target_at_rank(ranks: list[int], num_classes: int) -> tuple[Tensor, Tensor]:
    """Logits whose target is the best, second best, ... entry of each row (0 = best)."""
    logits = torch.arange(num_classes, 0, -1, dtype=torch.float32).repeat(len(ranks), 1)
    targets = torch.tensor(ranks)
    shuffle = torch.randperm(num_classes, generator=torch.Generator().manual_seed(0))
    return logits[:, shuffle], torch.argsort(shuffle)[targets]


def _reading(*batches: tuple[Tensor, Tensor]) -> Reading:
    meter = Meter("cpu", TASK.num_counts)
    for step, (logits, targets) in enumerate(batches):
        meter.update(torch.tensor(1.0), TASK.counts(logits, targets), len(targets), step)
    return meter.read()


def test_accuracies_equal_manual_count() -> None:
    reading = _reading(_logits_with_target_at_rank([0, 4, 5], 10), _logits_with_target_at_rank([0, 0], 10))
    assert TASK.scores(reading) == {"top1": 60.0, "top5": 80.0}


def test_loss_is_smoothed_in_training_and_plain_in_validation() -> None:
    logits, targets = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 6, 3, 3])
    smoothed = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=SMOOTHING)
    assert torch.equal(TASK.loss(logits, targets), smoothed)
    loss, counts = TASK.scored(logits, targets)
    assert torch.equal(loss, F.cross_entropy(logits, targets, reduction="sum"))
    assert torch.equal(counts, TASK.counts(logits, targets))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counting_never_synchronizes_with_device() -> None:
    logits, targets = (tensor.cuda() for tensor in _logits_with_target_at_rank([0, 3], 10))
    TASK.counts(logits, targets)
    with no_synchronization():
        TASK.counts(logits, targets)


def _task(smoothing: float, **regularization: object) -> Task:
    return task_of(
        parse_experiment({"optimizer": {"label_smoothing": smoothing}, "regularization": regularization}, "test")
    )


def _mixed_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, classes, and the shares of the classes if each image is mixed with the last but its index."""
    generator = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(6, 7, generator=generator), torch.randint(7, (6,), generator=generator)
    shares = F.one_hot(targets, 7).float()
    return logits, targets, 0.3 * shares + 0.7 * shares.flip(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_mixed_images_equals_timm(smoothing: float) -> None:
    mixup = pytest.importorskip("timm.data.mixup")
    reference = pytest.importorskip("timm.loss").SoftTargetCrossEntropy()
    logits, targets, shares = _mixed_batch()
    expected = reference(logits, mixup.mixup_target(targets, 7, lam=0.3, smoothing=smoothing))
    torch.testing.assert_close(_task(smoothing).loss(logits, shares) / 6, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2, 0.5])
def test_binary_cross_entropy_equals_timm(smoothing: float, threshold: float | None) -> None:
    mixup = pytest.importorskip("timm.data.mixup")
    loss = pytest.importorskip("timm.loss")
    logits, targets, shares = _mixed_batch()
    task = _task(smoothing, loss="bce", bce_target_threshold=threshold)
    of_classes = loss.BinaryCrossEntropy(smoothing, target_threshold=threshold)
    torch.testing.assert_close(task.loss(logits, targets) / 6, of_classes(logits, targets))
    of_mixed = loss.BinaryCrossEntropy(0.0, target_threshold=threshold)
    expected = of_mixed(logits, mixup.mixup_target(targets, 7, lam=0.3, smoothing=smoothing))
    torch.testing.assert_close(task.loss(logits, shares) / 6, expected)
    torch.testing.assert_close(task.loss(logits.double(), shares).float(), task.loss(logits, shares))


def test_target_of_mixed_image_is_its_largest_share() -> None:
    logits, targets = _logits_with_target_at_rank([0, 4, 5], 10)
    others = (targets + 1) % 10
    shares = 0.6 * F.one_hot(targets, 10) + 0.4 * F.one_hot(others, 10)
    assert torch.equal(TASK.counts(logits, shares), TASK.counts(logits, targets))


def test_standard_error_of_accuracy_is_binomial() -> None:
    assert standard_error(76.0, 50_000) == pytest.approx(0.191, abs=5e-4)  # at ImageNet's size, half of 0.38 points
    assert standard_error(100.0, 7) is None
    assert standard_error(0.0, 7) is None
    hits = [1] * 3 + [0] * 7
    assert standard_error(30.0, 10) == pytest.approx(100 * pstdev(hits) / math.sqrt(10))


def test_probabilities_are_sorted_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ((classes, probabilities),) = best_classes(logits, top=2)
    assert classes == (1, 3)
    assert probabilities == pytest.approx(logits.double().softmax(1)[0, [1, 3]].tolist())
    assert best_classes(torch.zeros(1, 1000))[0][0] == (0, 1, 2, 3, 4)
