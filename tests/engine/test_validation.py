"""Every image counts exactly once on any number of processes, and ten crops are averaged as published."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.dist.spawn import run_distributed
from zoo.config.experiment import Experiment
from zoo.data.dataset import Batch
from zoo.data.sampler import ValBatches
from zoo.engine._validation import validate
from zoo.errors import ZooError
from zoo.tasks import task_of
from zoo.tasks.classification import ClassificationResult as Result
from zoo.tasks.protocols import CropProtocol

CPU = torch.device("cpu")
CENTER, TEN_CROPS = CropProtocol(4, 4, False), CropProtocol(5, 4, True)
CLASSES = 6
TASK = task_of(Experiment())


class Net(nn.Module):
    """A linear classifier of 4 px images with dropout, so that a forgotten eval() changes the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 4 * 4, CLASSES)
        self.drop = nn.Dropout(0.5)
        weights = torch.randn(self.fc.weight.shape, generator=torch.Generator().manual_seed(1))
        self.fc.load_state_dict({"weight": weights, "bias": torch.zeros(CLASSES)})

    def forward(self, images: Tensor) -> Tensor:
        assert len(images), "some networks cannot do without images"
        return self.fc(self.drop(images).flatten(1))


def _images(count: int, *crops: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, *crops, 3, 4, 4, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def _loader(images: Tensor, targets: Tensor, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    for indices in ValBatches(len(images), batch_size, rank=rank, world_size=world_size):
        chosen = [index for _, index in indices]
        yield Batch(images[chosen], targets[chosen])


def _validate(model: nn.Module, count: int, batch_size: int, protocol: CropProtocol = CENTER) -> Result:
    images, targets = _images(count, *([10] if protocol.ten_crops else []))
    return validate(model, TASK, _loader(images, targets, batch_size), CPU, protocol=protocol)


def _validate_on_ranks(counts_and_batch_sizes: list[tuple[int, int]]) -> tuple[list[Result], int]:
    """Return the results and the number of collectives that they took."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Net())
    results = []
    with (
        mock.patch.object(DistributedDataParallel, "forward", side_effect=AssertionError("ranks would wait")),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
    ):
        for count, batch_size in counts_and_batch_sizes:
            loader = _loader(*_images(count), batch_size, rank, world_size)
            results.append(validate(model, TASK, loader, CPU, world_size, protocol=CENTER))
    return results, all_reduce.call_count


UNEVEN = [(7, 1), (7, 2), (1, 3), (4, 4), (16, 3)]


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_any_number_of_ranks_gives_scores_of_one_process(world_size: int) -> None:
    expected = [_validate(Net(), count, count) for count, _ in UNEVEN]
    for results, num_collectives in run_distributed(_validate_on_ranks, world_size, UNEVEN):
        assert num_collectives == len(UNEVEN)
        for result, wanted in zip(results, expected, strict=True):
            assert (result.count, result.top1, result.top5) == (wanted.count, wanted.top1, wanted.top5)
            assert result.loss == pytest.approx(wanted.loss, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 50])
def test_batch_size_does_not_change_scores(batch_size: int) -> None:
    images, targets = _images(23)
    logits = Net().eval()(images)
    result = _validate(Net(), 23, batch_size)
    assert result.count == 23
    assert result.top1 == 100 * int((logits.argmax(1) == targets).sum()) / 23
    assert result.loss == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)


def test_ten_crop_logits_are_averaged_before_loss_and_accuracy() -> None:
    images, targets = _images(3, 10)
    net = Net().eval()
    by_hand = torch.stack([sum(net(crop[None])[0] for crop in image) / 10 for image in images])
    result = _validate(Net(), 3, 2, TEN_CROPS)
    assert result.loss == pytest.approx(F.cross_entropy(by_hand, targets).item(), rel=1e-5)
    assert result.top1 == 100 * int((by_hand.argmax(1) == targets).sum()) / 3


def test_mode_of_each_module_is_restored_even_after_error() -> None:
    net = Net().train()
    net.fc.eval()
    with mock.patch.object(net, "forward", side_effect=ZooError("broken")), pytest.raises(ZooError, match="broken"):
        _validate(net, 2, 2)
    assert (net.training, net.fc.training, net.drop.training) == (True, False, True)


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_loss_of_half_precision_logits_is_taken_in_float32(amp: str, dtype: torch.dtype) -> None:
    images, targets = _images(5)
    with torch.autocast("cpu", dtype):
        logits = Net().eval()(images)
    assert logits.dtype == dtype
    result = validate(Net(), TASK, _loader(images, targets, 5), CPU, protocol=CENTER, amp=amp)
    assert result.loss == pytest.approx(F.cross_entropy(logits.float(), targets).item(), rel=1e-6)
