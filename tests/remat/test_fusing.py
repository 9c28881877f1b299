"""Fused norms and activations equal torch's to rounding, hold what exact recipes hold, and change nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.remat.programs import Checkpointed
from zoo.ops.abn import native
from zoo.ops.abn.backend import forced
from zoo.remat import Rematerializer
from zoo.remat.lean import lean
from zoo.remat.memory_use import measure_memory
from zoo.remat.recipes import RecipeError

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="the C++ kernels are not built")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda y: y, "relu": F.relu, "silu": F.silu, "hardswish": F.hardswish,
}  # fmt: skip
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
SHAPES = ((3, 5, 7, 9), (2, 33, 4, 4), (2, 2, 96, 96), (4, 6), (2, 3, 11))


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare with a tolerance relative to the largest expected number."""
    error = (found.double() - expected.double()).detach().abs().max()
    assert error <= tolerance * max(1.0, float(expected.detach().abs().max())), error


def random(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return numbers of mean 1 and deviation 2, laid out as asked for."""
    x = (2 * torch.randn(shape, dtype=torch.float64) + 1).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last and x.ndim == 4 else x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_equal_float64_autograd(activation: str, dtype: torch.dtype, channels_last: bool) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        x, dz = (random(shape, dtype, channels_last) for _ in range(2))
        weight, bias = torch.randn(2, shape[1]).to(dtype)
        wide = [each.double().requires_grad_() for each in (x, weight, bias)]
        expected = ACTIVATIONS[activation](F.batch_norm(wide[0], None, None, wide[1], wide[2], True, 0.1, 1e-5))
        gradients = torch.autograd.grad(expected, wide, dz.double())
        arguments = (weight, bias, *native.statistics(x), 1e-5, activation)
        z, into = native.norm_act(x, *arguments), torch.full_like(x, torch.nan)
        native.norm_act_into(into, x, *arguments)
        assert (z.dtype, z.stride()) == (dtype, x.stride())
        assert torch.equal(z, into)
        found = native.norm_act_backward(x, dz, *arguments)
        for a, b in zip((z, *found), (expected, *gradients), strict=True):
            assert_close(a, b, TOLERANCES[dtype])


def test_layouts_without_kernels_and_norms_without_parameters() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6, 4, 3, dtype=torch.float64).transpose(0, 1).requires_grad_()
    dz = torch.randn_like(x).transpose(2, 3).contiguous().transpose(2, 3)
    expected = F.silu(F.batch_norm(x, None, None, training=True))
    arguments = (None, None, *native.statistics(x.detach()), 1e-5, "silu")
    into = torch.empty_like(x).detach()
    native.norm_act_into(into, x.detach(), *arguments)
    assert_close(native.norm_act(x.detach(), *arguments), expected, 1e-12)
    assert_close(into, expected, 1e-12)
    found = native.norm_act_backward(x.detach(), dz, *arguments)[0]
    assert_close(found, torch.autograd.grad(expected, x, dz)[0], 1e-12)


class Net(nn.Module):
    """Convolutions, norms and activations in the ways that networks write them, and in some that nobody should."""

    def __init__(self, inplace: bool, activation: type[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(7))
        self.plain_norm = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.act = activation(inplace=inplace)
        self.used_otherwise: Callable[[Tensor], Any] = lambda y: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norms[0](self.convs[0](x)))  # directly
        x = F.relu(self.norms[1](self.convs[1](x)) + x, inplace=True)  # of a sum
        y = self.norms[2](self.convs[2](x))
        x = self.act(y) + y  # the norm's output, overwritten or not, is needed once more
        y = self.norms[3](self.convs[3](x))
        x = torch.relu(y) + torch.relu_(y)  # activated twice
        x = self.act(self.plain_norm(self.convs[4](x)))
        y = self.norms[4](self.convs[5](x))
        self.used_otherwise(y)
        x = self.act(y)
        y, _ = self.norms[5](self.convs[6](x)), self.convs[0].weight + 1  # torch is asked for something in between
        x = self.act(y)
        y = self.norms[6](self.convs[7](x)).reshape(len(x), -1)
        return self.act(y).square().mean()


def train(model: nn.Module, images: Tensor, steps: int = 3) -> list[Tensor]:
    """Return losses, gradients and buffers of some steps; the weights are moved after each."""
    values = []
    for _ in range(steps):
        x = images.clone().requires_grad_()
        loss = model(x)
        gradients = torch.autograd.grad(loss, [x, *model.parameters()])
        values += [loss.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients[1:], strict=True):
                parameter -= 0.1 * gradient
    return values


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Hardswish])
def test_networks_train_as_plain_ones(activation: type[nn.Module], inplace: bool, channels_last: bool) -> None:
    torch.manual_seed(0)
    plain = Net(inplace, activation).double()
    images = random((2, 3, 12, 10), torch.float64, channels_last)
    model = lean(copy.deepcopy(plain), exact=False)
    for found, expected in zip(train(model, images), train(plain, images), strict=True):
        assert_close(found, expected, 1e-10)


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.register_hook(lambda gradient: 2 * gradient),
        lambda y: y.detach().numpy()[:].sum(),
        lambda y: y.data.sum(),
        lambda y: torch.ops.aten.sum.default(y),
        lambda y: y.relu() if y.is_contiguous() else y,
    ],
)
def test_a_norm_that_is_used_otherwise_after_it_was_fused_has_its_numbers(use: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    plain = Net(False, nn.SiLU).double()
    images = random((2, 3, 12, 10), torch.float64, False)
    model = lean(copy.deepcopy(plain), exact=False)
    train(plain, images), train(model, images)
    seen: list[Any] = []
    for each in (plain, model):
        each.used_otherwise = lambda y: seen.append(use(y))
    for found, expected in zip(train(model, images), train(plain, images), strict=True):
        assert_close(found, expected, 1e-9)
    for a, b in zip(seen[:3], seen[3:], strict=True):
        if not hasattr(a, "remove"):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_it_holds_no_more_than_exact_recipes() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(True)) for _ in range(4)]
    exact = lean(nn.Sequential(nn.Conv2d(3, 8, 1), *blocks))
    fused = lean(copy.deepcopy(exact), exact=False)
    images = torch.randn(2, 3, 64, 64)
    for _ in range(2):  # in the second pass norms whose activation follows are not written
        held = [
            measure_memory(lambda model=model: model(images).square().mean(), model.parameters()).held  # type: ignore[misc]
            for model in (exact, fused)
        ]
        assert held[1] <= held[0]


def test_a_norm_that_is_always_followed_by_its_activation_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    apply, into = native.norm_act, native.norm_act_into
    monkeypatch.setattr(native, "norm_act", lambda *args: (calls.append(args[-1]), apply(*args))[1])
    monkeypatch.setattr(native, "norm_act_into", lambda *args: (calls.append(args[-1] + "_"), into(*args))[1])
    model = lean(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), exact=False)
    images = torch.randn(2, 3, 5, 5)
    model(images), model(images)
    assert calls == ["identity", "relu_", "relu_"]


def test_nothing_is_fused_without_kernels_in_evaluation_and_in_a_checkpoint() -> None:
    torch.manual_seed(0)
    plain = Net(True, nn.SiLU)
    images = torch.randn(2, 3, 12, 12)
    with forced("reference"):
        model = lean(copy.deepcopy(plain), exact=False)
        assert all(map(torch.equal, train(model, images), train(copy.deepcopy(plain), images)))

    model = lean(Checkpointed(copy.deepcopy(plain)), exact=False)
    assert all(map(torch.equal, train(model, images), train(Checkpointed(copy.deepcopy(plain)), images)))
    norm, x = nn.BatchNorm2d(3).eval(), images.clone().requires_grad_()
    frozen = lean(nn.Sequential(copy.deepcopy(norm), nn.SiLU()), exact=False)
    outputs = [frozen(x), F.silu(norm(x))]
    assert torch.equal(*outputs)
    assert torch.equal(*[torch.autograd.grad(output.sum(), x)[0] for output in outputs])


def test_a_graph_is_retained_and_overwritten_weights_are_an_error() -> None:
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, 8, 8).requires_grad_()
    with Rematerializer(exact=False, smallest_bytes=0):
        loss = F.silu(norm(x * 2)).square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x, retain_graph=True)[0])
    with torch.no_grad():
        norm.weight.add_(1)
    with pytest.raises(RecipeError, match="modified in place"):
        torch.autograd.grad(loss, x)
