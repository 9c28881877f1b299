"""cuDNN's batch norm in captured graphs, on the CPU with kernels in its place that round differently from torch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from tests.remat.cudnn import CudnnNorm, on_the_cpu
from tests.remat.programs import COMPILES, are_equal, held
from zoo.remat.graph import capture

aten = torch.ops.aten
pytestmark = COMPILES


@pytest.fixture(autouse=True)
def _cudnn() -> Iterator[None]:
    with on_the_cpu():
        yield


def _net(norm: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8), nn.ReLU(inplace=True)] for _ in range(4)]
    return nn.Sequential(*(each for layer in layers for each in layer))


def _train(net: nn.Module) -> list[Tensor]:
    x = torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net.train(step != 1)  # in the second step the running statistics are used, as frozen norms do
        out = net(x)
        out.square().mean().backward()
        optimizer.step()
    net.eval()
    return [out, net(x), *net.parameters(), *net.buffers()]


def test_captured_training_has_the_bits_of_cudnn() -> None:
    expected = _train(_net(CudnnNorm))
    others = _train(_net(nn.BatchNorm2d))
    found = _train(zoo.lean(_net(nn.BatchNorm2d), capture=True))
    assert are_equal(found, expected)
    assert not are_equal(others, expected)


def test_captured_training_holds_as_little_as_with_torchs_norm() -> None:
    x = torch.randn(4, 8, 32, 32)
    assert held(zoo.lean(_net(nn.BatchNorm2d), capture=True), x) < 0.65 * held(_net(nn.BatchNorm2d), x)


def test_a_graph_that_cannot_be_captured_keeps_its_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(capture, "partition", fail)
    expected = _train(_net(nn.BatchNorm2d))  # eager training on the CPU does not call cuDNN
    with pytest.warns(capture.NotCaptured):
        found = _train(zoo.lean(_net(nn.BatchNorm2d), capture=True))
    assert are_equal(found, expected)


def test_a_norm_without_running_statistics_is_captured() -> None:
    weight, bias = torch.rand(2, 8).unbind()
    x = torch.randn(4, 8, 32, 32, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True).relu()

    found = torch.compile(call, backend=capture.backend, fullgraph=True)(x)
    expected = aten.cudnn_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)[0].relu()
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
    assert torch.equal(found, expected)
    assert torch.equal(*gradients)


def test_eager_lean_repeats_cudnn() -> None:
    plain = _net(CudnnNorm)
    lean = zoo.lean(copy.deepcopy(plain))
    assert are_equal(_train(lean), _train(plain))
