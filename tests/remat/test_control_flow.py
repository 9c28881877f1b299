"""Control-flow operators of torch, which compile their branches also in eager mode, work in lean networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop

from tests.remat.programs import COMPILES, assert_same_step
from zoo.memory.report import memory_report
from zoo.remat._lean import lean
from zoo.torch_internals.dispatch import dispatch_modes, top_saved_tensors_hooks

pytestmark = COMPILES


class Network(nn.Module):
    """Two layers and a parameter for the branches of a test."""

    def __init__(self, branch: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(64, 64), nn.Linear(64, 64), nn.Parameter(torch.rand(64))
        self.branch = branch

    def positive(self, x: Tensor) -> Tensor:
        return self.first(x).relu()

    def negative(self, x: Tensor) -> Tensor:
        return (self.second(x) * self.scale).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.branch(self, self.first(x).sigmoid()).tanh()).exp()


def of_methods(net: Network, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, net.positive, net.negative, (h,))


def of_closures(net: Network, h: Tensor) -> Tensor:
    doubled = net.scale * 2
    return torch.cond(h.mean() > 1, lambda h: h * doubled, lambda h: (h @ net.second.weight).sin() * doubled, (h,))


def of_modules(net: Network, h: Tensor) -> Tensor:
    return torch.cond(h.sum() < 0, net.first, net.second, (h,))


def of_several_outputs(net: Network, h: Tensor) -> Tensor:
    a, b = torch.cond(h.sum() > 0, lambda h: (net.first(h), h.sin()), lambda h: (h.sin(), net.second(h)), (h,))
    return a * b


def nested(net: Network, h: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return torch.cond(h.std() > 100, net.first, net.negative, (h,))

    return torch.cond(h.sum() > 0, inner, lambda h: h.sin(), (h,))


def twice(net: Network, h: Tensor) -> Tensor:
    return of_methods(net, h.exp()) * of_modules(net, h.sin())


def loop(_: Network, h: Tensor) -> Tensor:
    start = torch.tensor(0), h.detach()
    return h * while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, (0.9 * x).tanh()), start)[1]


def over_rows(net: Network, h: Tensor) -> Tensor:
    return map_rows(lambda row, scale: (row * scale).sin(), h, net.scale)


BRANCHES = [of_methods, of_closures, of_modules, of_several_outputs, nested, twice, loop, over_rows]


@pytest.mark.parametrize("branch", BRANCHES)
def test_control_flow_is_bit_identical_to_plain_training(branch: Callable[[Network, Tensor], Tensor]) -> None:
    plain = Network(branch)
    model = lean(copy.deepcopy(plain))
    for seed in range(2):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
        assert_same_step(model, plain, x)
    assert not dispatch_modes()
    assert top_saved_tensors_hooks(True) is None


@pytest.mark.parametrize("budget", [0.5, "1GB"])
def test_control_flow_trains_within_budget(budget: Any) -> None:
    plain = Network(of_methods)
    assert_same_step(lean(copy.deepcopy(plain), budget), plain, torch.randn(256, 64))


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_report_runs_control_flow(budget: str | None) -> None:
    report = memory_report(Network(of_methods), torch.randn(256, 64), budget=budget)
    assert 0 < report.lean <= report.plain
    assert report.peak > report.lean
