"""Sums are exact, reading them costs one all-reduce, and a bad loss is remembered with its step."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.spawn import run_distributed
from tests.synchronization import no_synchronization
from zoo.engine._meters import Meter, Reading


def _add(meter: Meter, loss: float, counts: list[int], num_images: int, step: int) -> None:
    meter.update(torch.tensor(loss), torch.tensor(counts), num_images, step)


def _sums(reading: Reading) -> tuple[float, list[int], int, int | None]:
    return reading.loss_sum, reading.counts.tolist(), reading.count, reading.first_bad_step


def _read_once_per_rank(finite: bool) -> tuple[Reading, int]:
    """Rank 0 has an image, bad at step 11; rank 1 two, bad at step 7; rank 2 nothing."""
    meter = Meter("cpu", 2)
    rank = dist.get_rank()
    if rank == 0:
        _add(meter, 0.1 if finite else math.inf, [2**53 + 1, 0], 1, step=11)
    if rank == 1:
        _add(meter, 0.2 if finite else math.nan, [2**53 + 2, 5], 2, step=7)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        return meter.read(reduce=True), all_reduce.call_count


def test_sums_equal_manual_count() -> None:
    meter = Meter("cpu", 2)
    _add(meter, 3.0, [1, 2], 3, step=0)
    _add(meter, 2.0, [2, 2], 2, step=1)
    assert _sums(meter.read()) == (5.0, [3, 4], 5, None)
    assert meter.read().loss == 1.0


def test_difference_of_two_readings_covers_samples_between_them() -> None:
    meter, later = Meter("cpu", 2), Meter("cpu", 2)
    _add(meter, 3.0, [1, 2], 3, step=0)
    before = meter.read()
    for both in (meter, later):
        _add(both, 2.25, [7, 5], 4, step=1)
    assert _sums(meter.read().since(before)) == _sums(later.read())


def test_loss_sums_do_not_depend_on_order() -> None:
    losses = (4 * torch.randn(1000, generator=torch.Generator().manual_seed(0))).exp().tolist()
    assert reduce(add, losses) != reduce(add, reversed(losses))
    meters = [Meter("cpu", 1), Meter("cpu", 1)]
    for loss, last_loss in zip(losses, reversed(losses), strict=True):
        _add(meters[0], loss, [0], 1, 0)
        _add(meters[1], last_loss, [0], 1, 0)
    assert meters[0].read().loss_sum == meters[1].read().loss_sum == pytest.approx(sum(losses), rel=1e-9)


def test_loss_sums_do_not_lose_small_terms_of_long_epoch() -> None:
    meter = Meter("cpu", 1)
    _add(meter, 2.0**24, [0], 1, step=0)
    for step in range(4):
        _add(meter, 1.0, [0], 1, step)
    assert meter.read().loss == (2**24 + 4) / 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_first_non_finite_step_is_remembered(bad: float) -> None:
    meter = Meter("cpu", 1)
    for step, loss in enumerate([1.0, 2.0, bad, bad, 1.0]):
        _add(meter, loss, [0], 1, step)
    assert meter.read().first_bad_step == 2
    meter.reset()
    assert meter.read().first_bad_step is None


def test_empty_meter_returns_nan() -> None:
    reading = Meter("cpu", 2).read()
    assert (reading.count, reading.counts.tolist()) == (0, [0, 0])
    assert math.isnan(reading.loss)


def test_restored_meter_continues_where_saved_one_stopped() -> None:
    first, second = Meter("cpu", 2), Meter("cpu", 2)
    _add(first, 4.0, [1, 1], 2, step=3)
    saved = first.state()
    first.reset()
    second.load_state(saved)
    _add(second, math.nan, [0, 2], 2, step=4)
    reading = second.read()
    assert (reading.counts.tolist(), reading.count, reading.first_bad_step) == ([1, 3], 4, 4)


@pytest.mark.dist
@pytest.mark.parametrize("finite", [True, False])
def test_ranks_agree_after_single_all_reduce(finite: bool) -> None:
    """A sum of whole numbers beyond 2**53, which float64 cannot hold, stays exact."""
    for reading, num_collectives in run_distributed(_read_once_per_rank, 3, finite):
        assert num_collectives == 1
        assert (reading.count, reading.counts.tolist()) == (3, [2**54 + 3, 5])
        if finite:
            assert reading.loss_sum == sum(round(loss * 2**24) for loss in (0.1, 0.2)) / 2**24
            assert reading.first_bad_step is None
        else:
            assert math.isnan(reading.loss)
            assert reading.first_bad_step == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_update_never_synchronizes_with_device() -> None:
    meter = Meter("cuda", 2)
    counts: Tensor = torch.ones(2, dtype=torch.int64, device="cuda")
    loss = torch.ones((), device="cuda")
    meter.update(loss, counts, 2, step=0)
    with no_synchronization():
        meter.update(loss, counts, 2, step=1)
    assert meter.read().count == 4
