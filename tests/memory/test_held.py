"""Held memory is counted once, for the module that saves it, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.remat.programs import Layers, images, network
from zoo.memory.held import (
    INPUT,
    NOT_READ,
    NOT_RECOMPUTABLE,
    NOT_SMALLER,
    RECOMPUTED,
    SMALL,
    WITH_BUDGET,
    WITHIN_BUDGET,
    HeldLog,
)
from zoo.memory.report import MemoryReport


def reasons_of(report: MemoryReport, made_by: str) -> set[str]:
    """Return the reasons for which lean training holds, or does not hold, the outputs of an operation."""
    return {each.reason for module in report.modules for each in module.memory if each.made_by == made_by}


def of_recomputed(x: Tensor, first: nn.Module) -> Tensor:
    hidden = first(x)
    return hidden.square() * hidden.exp().sin() * (hidden + 1).tanh_()


def of_enlarged(x: Tensor, first: nn.Module) -> Tensor:
    small = first(x)[:, :16].cumsum(1)
    return torch.cat([small, small, small, small], 1).exp()


def of_products(x: Tensor, *layers: nn.Module) -> Tensor:
    for layer in layers:
        x = F.gelu(layer(x))
    return x


def of_dropout(x: Tensor, first: nn.Module) -> Tensor:
    return F.dropout(first(x).relu(), 0.5).sin()


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
@pytest.mark.parametrize(
    ("function", "made_by", "budget", "reason"),
    [
        (of_recomputed, "aten.exp", None, RECOMPUTED),
        (of_recomputed, "aten.tanh_", None, RECOMPUTED),
        (lambda x, first: first(x).exp().sin(), "aten.exp", None, NOT_SMALLER),
        (lambda x, first: first(x)[:1, :8].exp().sin(), "aten.exp", None, SMALL),
        (lambda x, first: first(x).logcumsumexp(1).exp(), "aten.logcumsumexp", None, NOT_RECOMPUTABLE),
        (of_enlarged, "aten.cumsum", None, INPUT),
        (of_dropout, "zoo.lean", None, INPUT),  # the bits of the mask
        (of_products, "aten.addmm", None, WITH_BUDGET),
        (of_products, "aten.addmm", 0.5, RECOMPUTED),
        (of_products, "aten.addmm", 0.99, WITHIN_BUDGET),
    ],
)
def test_memory_of_each_module_has_reason(
    function: Callable[..., Tensor], made_by: str, budget: float | None, reason: str
) -> None:
    layers = [nn.Linear(64, 64) for _ in range(6 if function is of_products else 1)]
    report = zoo.memory_report(Layers(function, *layers), torch.randn(64, 64, 64), budget=budget)
    assert reason in reasons_of(report, made_by)


def test_frozen_layers_hold_only_signs() -> None:
    def function(x: Tensor, *layers: nn.Module) -> Tensor:
        x = F.relu(layers[1](layers[0](x)))  # reads its input, as it is the first that is frozen
        return F.relu(layers[3](layers[2](x)))

    layers = [nn.Conv2d(8, 8, 3, padding=1).requires_grad_(index == 0) for index in range(4)]
    report = zoo.memory_report(Layers(function, *layers), torch.randn(2, 8, 64, 64))
    one = 4 * 2 * 8 * 64**2
    assert report.plain == 4 * one
    assert report.lean == one + 2 * one // 32
    assert reasons_of(report, "aten.convolution") == {WITH_BUDGET, NOT_READ}
    assert reasons_of(report, "zoo.lean") == {INPUT}


class Keeping(nn.Module):
    """Keeps tensors in an attribute, with or without their history."""

    def __init__(self, has_history: bool) -> None:
        super().__init__()
        self.layer, self.has_history, self.state = nn.Linear(64, 64), has_history, []

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.state.append(out if self.has_history else out.detach() + 1)
        return (out + self.state[0]).sum(1)


@pytest.mark.parametrize("has_history", [True, False])
def test_state_of_network_and_outputs_are_not_held_for_backward(has_history: bool) -> None:
    report = zoo.memory_report(Keeping(has_history), torch.randn(8, 64, 64))
    assert (report.plain, report.lean) == (0, 0)


class Returning(nn.Sequential):
    """Returns its output in an object that torch does not take apart."""

    def forward(self, x: Tensor) -> Any:
        class Output:
            scores = super(Returning, self).forward(x)

        return Output()


def test_memory_does_not_depend_on_how_outputs_are_returned() -> None:
    layers, x = (nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.GELU()), torch.randn(8, 64, 64)
    reports = [zoo.memory_report(kind(*layers), x) for kind in (nn.Sequential, Returning)]
    assert reports[0].plain == reports[1].plain == 3 * 4 * 8 * 64**2 - 4 * 8 * 64**2
    assert reports[0].lean == reports[1].lean > 0
    assert reports[1].peak is None


def of_sparse(x: Tensor, first: nn.Module) -> Tensor:
    rows = first(x).relu().flatten(0, 1)
    return torch.sparse.mm((rows * (rows > 0.5)).to_sparse(), rows[:8].T).exp()


@pytest.mark.parametrize("budget", [None, 0.9])
def test_sparse_tensors_are_not_counted(budget: float | None) -> None:
    report = zoo.memory_report(Layers(of_sparse, nn.Linear(64, 64)), torch.randn(8, 64, 64), budget=budget)
    assert 0 < report.lean <= report.plain
    assert report.peak > report.lean


@pytest.mark.parametrize("budget", [None, 0.5])
def test_memory_without_gradients_is_reported(budget: float | None) -> None:
    report = zoo.memory_report(network().requires_grad_(False), images(), budget=budget)
    assert (report.plain, report.lean, report.peak) == (0, 0, None)


def test_each_storage_is_counted_once_for_the_module_that_saves_it_first() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Unflatten(1, (8, 8)), nn.Flatten())
    model.append(Layers(lambda x: x.view(-1).view(8, 8, 64).exp().mT.sin()))
    report = zoo.memory_report(model, torch.randn(64, 64))
    one = 4 * 64 * 64
    assert {each.name: each.plain for each in report.modules} == {"1": one, "5": one}


def test_log_of_pass_counts_what_autograd_holds() -> None:
    log, weight = HeldLog(), nn.Parameter(torch.ones(1000))
    with log.record(smallest_bytes=0):
        node = (weight.exp().sin() * weight).sum().grad_fn
    held = [each[:3] for each in log.memory()]
    assert held == [("", "aten.exp", 4000), ("", "aten.sin", 4000)]
    assert sum(each.lean for each in log.memory()) < 8000
    del node
