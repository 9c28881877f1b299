"""Compiled networks with a budget for what they keep for backward."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
from torch import nn

from tests.formula import relative_error
from zoo.benchmark.memory_use import measure_memory
from zoo.engine import wrapping
from zoo.engine.wrapping import unwrap

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU())
    ]
    return nn.Sequential(*layers)


def _held(budget: float | None) -> int:
    torch._dynamo.reset()
    network = wrapping.compile_network(_network(), budget)
    x = torch.randn(4, 8, 32, 32)
    return measure_memory(lambda: network(x).square().sum(), network.parameters()).held


def test_a_smaller_budget_keeps_less_and_the_whole_one_what_torch_keeps() -> None:
    without, whole, none = (_held(budget) for budget in (None, 1.0, 0.0))
    assert none < whole == without
    assert torch._functorch.config.activation_memory_budget == 1.0  # and the process keeps its own


def test_a_budget_changes_no_gradient_and_the_network_inside_is_found() -> None:
    torch._dynamo.reset()
    network = _network()
    wrapped = wrapping.compile_network(network, 0.1)
    x = torch.randn(4, 8, 32, 32)
    wrapped(x).square().sum().backward()
    gradients = [p.grad for p in network.parameters()]
    network.zero_grad()
    network(x).square().sum().backward()
    for ours, parameter in zip(gradients, network.parameters(), strict=True):
        assert relative_error(ours, parameter.grad) < 1e-3
    assert unwrap(wrapped) is network
