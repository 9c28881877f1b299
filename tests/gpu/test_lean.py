"""Lean training on a GPU is bit-identical to plain training and takes less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo.memory.allocations import measure_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),  # torch 2.11's compiler
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # raised by torch after a graph break
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.compiler.reset()
    yield
    torch.use_deterministic_algorithms(False)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + x, inplace=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))


def _convolutional() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Residual() for _ in range(3))), torch.randn(8, 3, 64, 64)


def _transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Attention() for _ in range(3))), torch.randn(8, 256, 64)


def _frozen_norms() -> tuple[nn.Module, Tensor]:
    net, x = _convolutional()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return net, x


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutional": _convolutional,
    "transformer": _transformer,
    "frozen norms": _frozen_norms,
}


def _new(name: str, layout: torch.memory_format) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net, x = NETS[name]()
    if x.ndim == 4:
        net, x = net.to(memory_format=layout), x.contiguous(memory_format=layout)
    return net.cuda(), x.cuda()


def _train(net: nn.Module, x: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Return outputs, gradients and buffers of three steps, and the state of the random number generator."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    results = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            out = net(x)
        out.float().square().mean().backward()
        results += [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
    return [*results, *net.buffers(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETS)
def test_lean_training_is_bit_identical_to_plain_training(
    name: str, dtype: torch.dtype | None, layout: torch.memory_format
) -> None:
    net, x = _new(name, layout)
    lean = zoo.lean(copy.deepcopy(net))
    expected = _train(net, x, dtype)
    found = _train(lean, x, dtype)
    assert len(found) == len(expected)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(("name", "ratio"), [("convolutional", 0.6), ("transformer", 0.9)])
def test_lean_training_holds_less(name: str, ratio: float) -> None:
    net, x = _new(name, torch.contiguous_format)
    lean = zoo.lean(copy.deepcopy(net))
    held = [measure_memory(lambda: each(x).sum(), each.parameters()).held for each in (net, lean)]  # noqa: B023
    assert held[1] < ratio * held[0]


@pytest.mark.parametrize("name", NETS)
def test_replayed_cuda_graph_is_bit_identical_to_plain_training(name: str) -> None:
    net, x = _new(name, torch.channels_last)
    lean = zoo.lean(copy.deepcopy(net))

    def step(net: nn.Module) -> list[Tensor]:
        out = net(x)
        gradients = torch.autograd.grad(out.square().mean(), list(net.parameters()))
        return [out, *gradients, *net.buffers()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(lean)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(lean)
    lean.load_state_dict(net.state_dict())
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        state = torch.cuda.get_rng_state()
        graph.replay()
        torch.cuda.set_rng_state(state)
        for found, expected in zip(recorded, step(net), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(8, 64, 96), (3, 37, 129), (16, 512, 256)])
def test_compiled_backward_uses_dropout_mask_of_forward(shape: tuple[int, ...], budget: float) -> None:
    """torch's own activation memory budgets draw other masks in backward: pytorch issue 198333."""

    def product(x: Tensor, weight: Tensor) -> Tensor:  # linear in x for a given mask
        return F.dropout(x, 0.5).transpose(-1, -2).contiguous() @ weight

    x, weight = torch.rand(shape, device="cuda").requires_grad_(), torch.rand(shape[-2], 16, device="cuda")
    out = torch.compile(product, options=zoo.remat.inductor_options(budget))(x, weight.requires_grad_())
    dout = torch.rand_like(out)
    (dx,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close((dx * x).sum(), (out * dout).sum(), rtol=1e-5, atol=0)
