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
from zoo.remat.graph import capture, cudnn_norm
from zoo.remat.graph.capture import backend
from zoo.remat.memory_use import measure_memory

aten = torch.ops.aten
pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.filterwarnings("ignore:.torch.jit.script.*:DeprecationWarning"),  # torch 2.11's own compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's own, after a graph break
]


def _forward(x: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, training: bool, *numbers: float) -> Any:
    """Return what cuDNN returns, computed in float64."""
    running = [None if each is None else each.double() for each in (mean, var)]
    assert training or mean is not None
    outputs = aten.native_batch_norm(x.double(), weight.double(), bias.double(), *running, training, *numbers)
    for old, new in zip((mean, var), running, strict=True):
        if old is not None:
            old.copy_(new)
    return *(each.float() for each in outputs), torch.ones(int(training), dtype=torch.uint8)


def _backward(x: Tensor, grad: Tensor, weight: Tensor, mean: Any, var: Any, *rest: Any) -> Any:
    save_mean, save_invstd, eps, reserve = rest
    assert reserve.tolist() == [1]
    arguments = (each.double() for each in (grad, x, weight))
    saved = save_mean.double(), save_invstd.double()
    gradients = aten.native_batch_norm_backward(*arguments, None, None, *saved, True, eps, [True] * 3)
    reserve.zero_()  # cuDNN may overwrite it
    return tuple(each.float() for each in gradients)


@pytest.fixture
def _cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU tensors have cuDNN's operators."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", _forward, "CPU")
    library.impl("cudnn_batch_norm_backward", _backward, "CPU")
    monkeypatch.setattr(cudnn_norm, "chooses_cudnn", lambda *_: True)
    monkeypatch.setattr(cudnn_norm, "cudnn_reserve_bytes", lambda _, training: int(training))
    torch._dynamo.reset()
    yield
    library._destroy()


class CudnnNorm(nn.BatchNorm2d):
    """Calls cuDNN as eager training on CUDA does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        arguments = self.weight, self.bias, self.running_mean, self.running_var
        out: Tensor = aten.cudnn_batch_norm(x, *arguments, self.training, self.momentum, self.eps)[0]
        return out


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


@pytest.mark.usefixtures("_cudnn")
def test_captured_training_has_the_bits_of_cudnn() -> None:
    expected = _train(_net(CudnnNorm))
    others = _train(_net(nn.BatchNorm2d))
    found = _train(zoo.lean(_net(nn.BatchNorm2d), capture=True))
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, others, expected))


@pytest.mark.usefixtures("_cudnn")
def test_captured_training_holds_as_little_as_with_torchs_norm() -> None:
    plain, lean = _net(nn.BatchNorm2d), zoo.lean(_net(nn.BatchNorm2d), capture=True)
    x = torch.randn(4, 8, 32, 32)
    held = [measure_memory(lambda: net(x).sum(), net.parameters()).held for net in (plain, lean)]  # noqa: B023
    assert held[1] < 0.6 * held[0]


@pytest.mark.usefixtures("_cudnn")
def test_a_graph_that_cannot_be_captured_keeps_its_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(capture, "partition", fail)
    expected = _train(_net(nn.BatchNorm2d))  # eager training on the CPU does not call cuDNN
    with pytest.warns(capture.NotCaptured):
        found = _train(zoo.lean(_net(nn.BatchNorm2d), capture=True))
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("_cudnn")
def test_a_norm_without_running_statistics_is_captured() -> None:
    weight, bias = torch.rand(2, 8).unbind()
    x = torch.randn(4, 8, 32, 32, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True).relu()

    found = torch.compile(call, backend=backend, fullgraph=True)(x)
    expected = aten.cudnn_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)[0].relu()
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
    assert torch.equal(found, expected)
    assert torch.equal(*gradients)


@pytest.mark.usefixtures("_cudnn")
def test_eager_lean_repeats_cudnn() -> None:
    plain = _net(CudnnNorm)
    lean = zoo.lean(copy.deepcopy(plain))
    assert all(map(torch.equal, _train(lean), _train(plain)))
