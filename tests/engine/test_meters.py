"""Averages are exact, reading them costs one all-reduce, and a bad loss is remembered with its step."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.spawn import run_distributed
from zoo.engine.meters import Meter, Reading


def _logits_with_target_at_rank(ranks: list[int], classes: int) -> tuple[Tensor, Tensor]:
    """Logits whose target is the best, second best, ... entry of each row (0 = best)."""
    logits = torch.arange(classes, 0, -1, dtype=torch.float32).repeat(len(ranks), 1)
    targets = torch.tensor(ranks)
    shuffle = torch.randperm(classes, generator=torch.Generator().manual_seed(0))
    return logits[:, shuffle], torch.argsort(shuffle)[targets]


def _read_once_per_rank() -> tuple[Reading, int]:
    """Rank 0 has a right image, bad at step 11; rank 1 two wrong, bad at step 7, and 3 skips; rank 2 nothing."""
    meter = Meter("cpu")
    rank = dist.get_rank()
    if rank == 0:
        meter.update(torch.tensor(float("inf")), *_logits_with_target_at_rank([0], 10), step=11)
    if rank == 1:
        meter.update(torch.tensor(float("nan")), *_logits_with_target_at_rank([9, 4], 10), step=7)
        meter.skip(3)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        return meter.read(reduce=True), all_reduce.call_count


def test_averages_are_those_of_a_hand_count() -> None:
    meter = Meter("cpu")
    meter.update(torch.tensor(3.0), *_logits_with_target_at_rank([0, 4, 5], 10), step=0)
    meter.update(torch.tensor(2.0), *_logits_with_target_at_rank([0, 0], 10), step=1)
    assert meter.read() == {
        "loss": 1.0,
        "top1": 60.0,
        "top5": 80.0,
        "count": 5,
        "skipped": 0,
        "first_bad_step": None,
    }


def test_top5_of_three_classes_is_among_all_of_them() -> None:
    meter = Meter("cpu")
    meter.update(torch.tensor(1.0), *_logits_with_target_at_rank([0, 1, 2, 2], 3), step=0)
    assert (meter.read()["top1"], meter.read()["top5"]) == (25.0, 100.0)


def test_logits_of_any_memory_layout_are_accepted() -> None:
    logits, targets = _logits_with_target_at_rank([0, 4, 5], 10)
    meter = Meter("cpu")
    meter.update(torch.tensor(1.0), logits.t().contiguous().t(), targets, step=0)
    assert meter.read()["top1"] == pytest.approx(100 / 3)


def test_loss_sums_do_not_lose_small_terms_of_a_long_epoch() -> None:
    meter = Meter("cpu")
    logits, targets = _logits_with_target_at_rank([0], 2)
    meter.update(torch.tensor(2.0**24), logits, targets, step=0)
    for step in range(4):
        meter.update(torch.tensor(1.0), logits, targets, step)
    assert meter.read()["loss"] == (2**24 + 4) / 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_step_whose_loss_is_not_finite_is_remembered(bad: float) -> None:
    meter = Meter("cpu")
    logits, targets = _logits_with_target_at_rank([0], 2)
    for step, loss in enumerate([1.0, 2.0, bad, bad, 1.0]):
        meter.update(torch.tensor(loss), logits, targets, step)
    assert meter.read()["first_bad_step"] == 2
    meter.reset()
    assert meter.read()["first_bad_step"] is None


def test_a_meter_that_saw_nothing_reads_nan_instead_of_failing() -> None:
    reading = Meter("cpu").read()
    assert reading["count"] == 0
    assert math.isnan(reading["loss"])
    assert math.isnan(reading["top1"])


def test_the_graph_of_the_loss_is_not_kept_alive() -> None:
    meter = Meter("cpu")
    loss = torch.ones((), requires_grad=True) * 2
    logits, targets = _logits_with_target_at_rank([0], 2)
    meter.update(loss, logits.requires_grad_(), targets, step=0)
    assert not any(tensor.requires_grad for tensor in meter.state().values())


def test_a_restored_meter_continues_where_the_saved_one_stopped() -> None:
    first, second = Meter("cpu"), Meter("cpu")
    first.update(torch.tensor(float("nan")), *_logits_with_target_at_rank([0, 7], 10), step=3)
    first.skip(2)
    saved = first.state()
    first.reset()
    second.load_state(saved)
    second.update(torch.tensor(1.0), *_logits_with_target_at_rank([1, 1], 10), step=4)
    reading = second.read()
    assert (reading["top1"], reading["top5"], reading["count"]) == (25.0, 75.0, 4)
    assert (reading["skipped"], reading["first_bad_step"]) == (2, 3)


@pytest.mark.dist
def test_three_ranks_agree_after_a_single_all_reduce_even_if_one_saw_nothing() -> None:
    results = run_distributed(_read_once_per_rank, 3)
    for reading, num_collectives in results:
        assert num_collectives == 1
        assert (reading["count"], reading["skipped"], reading["first_bad_step"]) == (3, 3, 7)
        assert reading["top1"] == pytest.approx(100 / 3)
        assert reading["top5"] == pytest.approx(200 / 3)
        assert math.isnan(reading["loss"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_update_never_waits_for_the_device() -> None:
    meter = Meter("cuda")
    logits, targets = (tensor.cuda() for tensor in _logits_with_target_at_rank([0, 3], 10))
    loss = torch.ones((), device="cuda")
    meter.update(loss, logits, targets, step=0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        meter.update(loss, logits, targets, step=1)
        meter.skip(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.read()["count"] == 4
