"""Layers on a GPU against the same layers in float64 on the CPU: norms as modules, pooling, norm + convolution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.formula import relative_error
from zoo.layers import InPlaceABN
from zoo.ops.pooling import max_pool2d, mean_pool2d

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    """Compute float32 convolutions in float32, so that results differ by roundings only."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def train(module: nn.Module, x: Tensor, steps: int = 2) -> list[Tensor]:
    """Return the output, the gradients and the buffers of a module after some training steps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        leaf = x.detach().clone().requires_grad_()
        module.zero_grad()
        out = module(leaf * 1)
        out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out))
        x = x * 1.5 + 0.25
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [out.detach(), leaf.grad, *gradients, *module.buffers()]


def assert_as_on_the_cpu(module: nn.Module, shape: tuple[int, ...], tolerance: float = 2e-5) -> None:
    """Compare the results of `train` in float32 on the device with float64 on the CPU."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = copy.deepcopy(module).double()
    found, expected = train(module.to(DEVICE), x.to(DEVICE, torch.float32)), train(exact, x)
    errors = [relative_error(a.cpu(), b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "identity"])
def test_norm_trains_as_on_cpu(activation, momentum, layout):
    layer = InPlaceABN(12, momentum=momentum, activation=activation)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.5, 1.5, 12))
        layer.bias.copy_(torch.linspace(-0.5, 0.5, 12))
    assert_as_on_the_cpu(layer, (6, 12, 9, 7))
    x = torch.randn(6, 12, 9, 7, device=DEVICE).contiguous(memory_format=layout)
    assert layer(x.clone()).stride() == x.stride()
    assert layer.num_batches_tracked.item() == 3


def test_norm_under_autocast_computes_in_dtype_of_its_input():
    net = nn.Sequential(nn.Conv2d(8, 16, 3), InPlaceABN(16)).to(DEVICE)
    x = torch.randn(4, 8, 12, 12, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = net(x)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
    full = copy.deepcopy(net)(x)
    assert relative_error(out.float(), full) < 2e-2


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_gives_outputs_and_gradients_of_torch(layout):
    x = torch.randn(3, 8, 21, 18, device=DEVICE).contiguous(memory_format=layout).requires_grad_()
    for ours, theirs in (
        (max_pool2d(x, 3, 2, 1), nn.functional.max_pool2d(x, 3, 2, 1)),
        (mean_pool2d(x), nn.functional.avg_pool2d(x, 2)),
    ):
        assert torch.equal(ours, theirs)
        dz = torch.randn_like(ours)
        gradients = [torch.autograd.grad(z, x, dz)[0] for z in (ours, theirs)]
        assert relative_error(*gradients) < 1e-6


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # the first call in backward's thread
@pytest.mark.parametrize(
    ("name", "memory"),
    [("resnet18", "auto"), ("resnext50", "checkpoint"), ("densenet121", "auto"), ("revnet38_cifar", "auto")],
)
def test_memory_saving_network_has_gradients_of_cpu(name, memory):
    torch.manual_seed(0)
    net = zoo.get(name, norm="inplace", memory=memory, num_classes=5).double()
    size = 32 if name.endswith("cifar") else 64
    x = torch.randn(4, 3, size, size, dtype=torch.float64)
    there = copy.deepcopy(net).to(DEVICE)
    found, expected = train(there, x.to(DEVICE), steps=1), train(net, x, steps=1)
    errors = [relative_error(a.cpu(), b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < 1e-5, max(errors)
