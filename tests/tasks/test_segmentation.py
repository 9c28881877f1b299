"""The loss of the hardest pixels, and scores of one confusion matrix at the resolution of the labels."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zoo
from tests.dist.spawn import run_distributed
from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.data.dataset import Batch
from zoo.engine._validation import validate
from zoo.errors import DataError
from zoo.memory.allocations import count_memory
from zoo.tasks import task_of
from zoo.tasks.protocols import WHOLE_IMAGES
from zoo.tasks.segmentation import SegmentationResult, SegmentationTask, bootstrapped_loss

CLASSES, IGNORE = 4, 255


CPU = torch.device("cpu")


def _task(**segmentation: object) -> SegmentationTask:
    content = {"network": {"arch": "deeplab_resnet18", "classes": CLASSES}, "segmentation": segmentation}
    task = task_of(parse_experiment(content, "test"))
    assert isinstance(task, SegmentationTask)
    return task


def _batch(count: int, height: int = 5, width: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and targets with ignored pixels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, CLASSES, height, width, generator=generator)
    targets = torch.randint(CLASSES, (count, height, width), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE
    return logits, targets


def _plain_loss(logits: Tensor, targets: Tensor, share: float, smoothing: float = 0.0) -> Tensor:
    """Return the sum over the images of the mean of the hardest pixels, by a loop in float64."""
    total = logits.new_zeros(())
    for image, target in zip(logits, targets, strict=True):
        logp = (image - image.exp().sum(0).log()).flatten(1)
        losses = []
        for pixel, label in enumerate(target.flatten().tolist()):
            if label == IGNORE:
                losses.append(logp.new_zeros(()))
            else:
                losses.append(-(1 - smoothing) * logp[label, pixel] - smoothing * logp[:, pixel].mean())
        losses.sort(key=Tensor.item, reverse=True)
        count = math.ceil(round(share * len(losses), 9))
        total = total + sum(losses[:count]) / count
    return total


@pytest.mark.parametrize("share", [0.01, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_loop_over_pixels(share: float, smoothing: float) -> None:
    logits, targets = _batch(3)
    logits = logits.double().requires_grad_()
    loss = bootstrapped_loss(logits, targets, hard_pixels=share, ignore_label=IGNORE, label_smoothing=smoothing)
    expected = _plain_loss(logits, targets, share, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_image_without_labels_has_loss_and_gradient_of_zero(share: float) -> None:
    logits, targets = _batch(2)
    targets[:] = IGNORE
    logits.requires_grad_()
    loss = bootstrapped_loss(logits, targets, hard_pixels=share, ignore_label=IGNORE)
    loss.backward()
    assert (loss.item(), logits.grad.abs().max().item()) == (0, 0)


def test_loss_is_identical_to_whole_batches() -> None:
    small = _batch(4, 8, 8)[0].requires_grad_()
    targets = _batch(4, 64, 64)[1]
    large = nn.functional.interpolate(small, size=(64, 64), mode="bilinear", align_corners=False)
    losses = nn.functional.cross_entropy(large, targets, reduction="none", ignore_index=IGNORE).flatten(1)
    expected = losses.topk(64 * 64 // 4, dim=1, sorted=False).values.mean(dim=1).sum()
    loss = _task().loss(small, targets)
    assert torch.equal(loss, expected)
    gradients = [torch.autograd.grad(value, small)[0] for value in (loss, expected)]
    assert torch.equal(*gradients)
    logits, labels = nn.Parameter(small.detach().to("meta")), targets.to("meta")
    memory = count_memory(lambda: _task().loss(logits, labels), [logits])
    assert memory.held < 100, "a number for each image"
    assert memory.peak < 4 * large[0].nbytes, "logits, their softmax and the gradients of both, of one image"


@pytest.mark.usefixtures("small_networks")
def test_step_has_gradients_of_the_whole_network() -> None:
    torch.manual_seed(0)
    model = zoo.get("deeplab_resnet18", num_classes=CLASSES).double()
    images, targets = torch.randn(2, 3, 32, 40).double(), _batch(2, 32, 40)[1]
    task = _task()
    trained = task.trained_network(model)
    assert trained(images).shape == (2, CLASSES, 4, 5)
    assert trained.training
    both = [
        torch.autograd.grad(task.loss(network(images), targets), list(model.parameters()))
        for network in (model, trained)
    ]
    for whole, ours in zip(*both, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)


def test_step_of_lean_network_holds_less() -> None:
    with torch.device("meta"):
        models = [zoo.get("deeplab_resnet18", num_classes=CLASSES, memory=memory) for memory in ("auto", "lean")]
        images = torch.empty(2, 3, 64, 64)
    networks = [_task().trained_network(model) for model in models]
    auto, lean = (
        count_memory(lambda: network(images).sum(), network.parameters()).held  # noqa: B023
        for network in networks
    )
    assert lean < 0.75 * auto


class Segments(nn.Module):
    """Each pixel's logits are fixed linear functions of its color, and differ between a pixel and its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, (1, 3), padding=(0, 1))
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images)


def _images(count: int) -> list[Batch]:
    """Images of different sizes, one to a batch, with label maps of the same sizes."""
    batches = []
    for index in range(count):
        height, width = 4 + index, 9 - index
        _, targets = _batch(1, height, width, seed=index)
        images = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(index))
        batches.append(Batch(images, targets))
    return batches


def _score(count: int, protocol: str = "whole", rank: int = 0, world_size: int = 1) -> SegmentationResult:
    batches = _images(count)[rank::world_size]
    result = validate(Segments(), _task(), batches, CPU, world_size, protocol=WHOLE_IMAGES[protocol])
    assert isinstance(result, SegmentationResult)
    return result


@pytest.mark.parametrize("protocol", ["whole", "whole-flip"])
def test_scores_count_all_pixels_together(protocol: str) -> None:
    net = Segments().eval().double()
    counts, losses = np.zeros((CLASSES, CLASSES), dtype=np.int64), []
    for batch in _images(5):
        images = batch.images.double()
        with torch.no_grad():
            probabilities = net(images).softmax(1)
            if protocol == "whole-flip":
                probabilities = (probabilities + net(images.flip(3)).softmax(1).flip(3)) / 2
        labeled = batch.targets[0] != IGNORE
        labels, own = batch.targets[0][labeled], probabilities[0][:, labeled]
        np.add.at(counts, (labels.numpy(), own.argmax(0).numpy()), 1)
        losses.append(-own.gather(0, labels[None]).log().mean().item())
    hits, union = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    result = _score(5, protocol)
    assert result.confusion == counts.tolist()
    assert result.iou == pytest.approx((100 * hits / union).tolist())
    assert result.miou == result.score == pytest.approx((100 * hits / union).mean())
    assert result.pixel_accuracy == pytest.approx(100 * hits.sum() / counts.sum())
    assert result.loss == pytest.approx(sum(losses) / 5, rel=1e-6)
    assert (result.count, result.protocol) == (5, protocol)


def _score_on_rank() -> SegmentationResult:
    return _score(5, rank=dist.get_rank(), world_size=dist.get_world_size())


@pytest.mark.dist
def test_three_processes_have_confusion_matrix_of_one() -> None:
    alone = _score(5)
    for result in run_distributed(_score_on_rank, 3):
        assert (result.confusion, result.miou) == (alone.confusion, alone.miou)
        assert result.loss == pytest.approx(alone.loss, rel=1e-12)


def test_validation_without_labels_raises_data_error() -> None:
    batch = Batch(torch.zeros(1, 3, 4, 4), torch.full((1, 4, 4), IGNORE))
    score = partial(validate, Segments(), _task(), [batch], CPU, protocol=WHOLE_IMAGES["whole"])
    refused(DataError, score, "1 label maps")
