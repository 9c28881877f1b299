"""Training steps that run before training leave a network as it was, so that training keeps its bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)

import zoo
from tests.remat.programs import are_equal
from tests.step import step
from zoo.ops.context import restored_buffers
from zoo.remat.lean import lean


class WithBuffer(nn.Module):
    """A network whose forward replaces the memory of a buffer at each call."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("low", torch.full((size,), -0.5))
        self.low: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.update(x.detach().amin(0))
        return (x - self.low.float()).relu().square()

    def update(self, low: Tensor) -> None:
        raise NotImplementedError


class Resized(WithBuffer):
    def update(self, low: Tensor) -> None:
        if self.low.numel() == 0:
            self.low.resize_(16).fill_(0)
        self.low.mul_(0.9).add_(low, alpha=0.1)


class Shrunk(WithBuffer):
    def __init__(self) -> None:
        super().__init__(16)

    def update(self, low: Tensor) -> None:
        first = self.low[:1] + low[:1]
        self.low.resize_(1).copy_(first)


class Set(WithBuffer):
    def update(self, low: Tensor) -> None:
        self.low.set_(low + self.low.sum())


class Rebound(WithBuffer):
    def update(self, low: Tensor) -> None:
        self.low.data = low.double() + self.low.sum()


class Late(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", None)

    def update(self, low: Tensor) -> None:
        self.low = low if self.low is None else 0.9 * self.low + 0.1 * low


class QuantizedWeight(nn.Module):
    """A layer with a fused fake quantization of its weight, per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.quantize = FusedMovingAvgObsFakeQuantize(
            observer=MovingAveragePerChannelMinMaxObserver, ch_axis=0, dtype=torch.qint8, quant_min=-128, quant_max=127
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantize(self.layer.weight), self.layer.bias).relu().square()


class Observed(nn.Module):
    def __init__(self, observer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.observer = nn.Linear(16, 16), observer()

    def forward(self, x: Tensor) -> Tensor:
        out = self.observer(self.layer(x))
        observed = getattr(self.observer, "max_val", None)
        return (out if observed is None else out * observed).relu().square()


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "resized from no elements": Resized,
    "resized to fewer elements": Shrunk,
    "set_": Set,
    "set through data, to another dtype": Rebound,
    "None at first": Late,
    "per-channel observer": lambda: Observed(lambda: PerChannelMinMaxObserver(ch_axis=1)),
    "moving per-channel observer": lambda: Observed(lambda: MovingAveragePerChannelMinMaxObserver(ch_axis=1)),
    "fused fake quantization": QuantizedWeight,
}


def batch(seed: int = 0) -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))


def state_of(model: nn.Module) -> list[Tensor]:
    return [each.clone() for each in (*model.parameters(), *model.buffers())]


@pytest.fixture(params=BUFFERS)
def build(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return BUFFERS[request.param]()

    return built


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_buffer_that_forward_replaces_has_the_bits_of_plain_training(build: Callable[[], nn.Module]) -> None:
    plain, model = build(), lean(build(), "3GB")
    for seed in range(2):
        assert are_equal(step(plain, batch(seed)), step(model, batch(seed)))
        assert are_equal(plain.buffers(), model.buffers())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("use", [zoo.memory_report, zoo.check])
def test_the_report_and_the_check_leave_a_buffer_as_it_was(
    build: Callable[[], nn.Module], use: Callable[..., Any]
) -> None:
    model = build()
    own, before = list(model.buffers()), state_of(model)
    use(model, batch())
    assert all(a is b for a, b in zip(own, model.buffers(), strict=True))
    assert are_equal(before, state_of(model))
    assert [each.dtype for each in before] == [each.dtype for each in state_of(model)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_restored_buffers_get_size_contents_and_dtype_back(build: Callable[[], nn.Module]) -> None:
    model = build()
    model(batch())
    own, before = list(model.buffers()), copy.deepcopy(list(model.buffers()))
    with restored_buffers(model):
        model(batch(1))
        for each in own:
            each.data = torch.ones(7, dtype=torch.float16)
    assert all(a is b for a, b in zip(own, model.buffers(), strict=True))
    assert are_equal(own, before)
    assert [each.dtype for each in own] == [each.dtype for each in before]
