"""The cost of a run is its seconds, multiplied by the number of GPUs where there are any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zoo.run import cost
from zoo.run.cost import CostMeter, total_cost

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test advances by hand."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(cost.time, "monotonic", lambda: clock.now)
    return clock


def test_seconds_are_those_of_the_clock_and_a_cpu_has_no_gpu_seconds(clock: SimpleNamespace) -> None:
    meter = CostMeter(CPU, 4)
    clock.now += 12.34
    assert meter.read() == {"seconds": 12.3, "gpu_seconds": None}


def test_gpu_seconds_are_multiplied_by_the_number_of_gpus(clock: SimpleNamespace) -> None:
    meter = CostMeter(GPU, 4)
    clock.now += 10.0
    assert meter.read() == {"seconds": 10.0, "gpu_seconds": 40.0}


def test_costs_of_parts_add_up_unless_a_part_is_unknown() -> None:
    part = {"seconds": 1.5, "gpu_seconds": 3.0}
    assert total_cost([part, part]) == {"seconds": 3.0, "gpu_seconds": 6.0}
    assert total_cost([part, {**part, "gpu_seconds": None}]) == {"seconds": 3.0, "gpu_seconds": None}
