"""Backward passes that record a graph, as for gradient penalties and forces, also save recipes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.remat.programs import are_equal, gradients
from zoo.memory.allocations import measure_memory
from zoo.remat._lean import lean
from zoo.torch_internals.dispatch import dispatch_modes, top_saved_tensors_hooks


def convolutions(*layers: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    body: list[nn.Module] = []
    for channels in (3, 16, 16):
        body += [nn.Conv2d(channels, 16, 3, padding=1), *(build() for build in layers)]
    return nn.Sequential(*body, nn.Conv2d(16, 1, 3, padding=1))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 1))


IMAGES, ROWS = torch.randn(2, 3, 48, 48), torch.randn(1024, 64)
#: A network, its inputs, and at most which share of plain training's bytes it holds with a gradient penalty.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, float]] = {
    "GroupNorm, SiLU": (lambda: convolutions(lambda: nn.GroupNorm(4, 16), nn.SiLU), IMAGES, 0.4),
    "LayerNorm, GELU": (perceptron, ROWS, 0.6),
    # The outputs of convolutions and of their backward are two of three maps that plain training holds.
    "LeakyReLU": (lambda: convolutions(nn.LeakyReLU), IMAGES, 0.7),
    "frozen": (lambda: convolutions(nn.ReLU).requires_grad_(False).append(nn.Conv2d(1, 1, 3)), IMAGES, 0.8),
    "Softplus": (lambda: convolutions(nn.Softplus), IMAGES, 0.6),
}


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.mean() + slope.square().mean()


def through_backward(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients of parameters have a graph, as for Hessian-vector products."""
    trained = [each for each in model.parameters() if each.requires_grad]
    slopes = torch.autograd.grad(model(x).square().mean(), trained, create_graph=True)
    return torch.stack([each.square().sum() for each in slopes]).sum()


def of_third_order(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return curvature.square().mean()


def under_hooks(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    with torch.autograd.graph.save_on_cpu():
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return slope.square().mean()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("loss", [penalized, through_backward, of_third_order, under_hooks])
def test_second_backward_is_bit_identical_to_plain_training(
    loss: Callable[[nn.Module, Tensor], Tensor], name: str
) -> None:
    build, x, _ = NETWORKS[name]
    results = []
    for model in (build(), lean(build())):
        for _ in range(2):
            value = loss(model, x)
            value.backward()
        results.append([value.detach(), *gradients(model)])
    assert are_equal(*results)
    assert not dispatch_modes()
    assert top_saved_tensors_hooks(True) is None


@pytest.mark.parametrize("name", NETWORKS)
def test_graph_of_backward_saves_recipes(name: str) -> None:
    build, x, share = NETWORKS[name]
    models = build(), lean(build())
    held = [measure_memory(lambda model=model: penalized(model, x), model.parameters()).held for model in models]
    assert held[1] < share * held[0]


def test_saved_tensors_read_outside_of_backward_leave_no_context() -> None:
    model = lean(convolutions(nn.SiLU))
    node: Any = model(IMAGES).grad_fn
    assert node._saved_input is not None
    assert not dispatch_modes()
    assert top_saved_tensors_hooks(True) is None


def test_error_in_backward_leaves_no_context() -> None:
    model = lean(convolutions(nn.SiLU))
    other = copy.deepcopy(model)
    x = IMAGES.clone().requires_grad_()
    y = model(x)

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not dispatch_modes()
    assert top_saved_tensors_hooks(True) is None
    penalized(other, IMAGES).backward()
