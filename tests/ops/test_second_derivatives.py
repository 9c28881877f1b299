"""Unsupported second derivatives raise an error on every path; first derivatives are bit-identical."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.refusals import refused
from zoo.layers import InPlaceABN, ReversibleBlock, ReversibleSequential

pytestmark = pytest.mark.usefixtures("small_networks")


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def chain() -> nn.Module:
    branches = [nn.Sequential(nn.Conv2d(8, 8, 1), nn.Tanh()) for _ in range(2)]
    return ReversibleSequential([ReversibleBlock(*branches)])


def norm() -> nn.Module:
    return InPlaceABN(16)


LAYERS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "in-place norm": norm}
HEADS: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "pool": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "frozen": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), frozen(nn.Linear(16, 1))),
    "trained": lambda: nn.Conv2d(16, 1, 1),
}


def network(layer: str, head: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 1), LAYERS[layer](), HEADS[head]())


def images(**options: Any) -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


def of_parameters(model: nn.Module) -> None:
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(model(images()).square().mean(), parameters, create_graph=True)
    torch.autograd.grad(gradients, parameters, [torch.ones_like(each) for each in gradients], allow_unused=True)


def penalty(model: nn.Module) -> None:
    x = images()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.square().sum().sqrt() - 1).square().backward()


def ada_hessian(model: nn.Module) -> None:
    model(images()).square().mean().backward(create_graph=True)
    parameters = [each for each in model.parameters() if each.grad is not None]
    gradients = [each.grad for each in parameters]
    torch.autograd.grad(gradients, parameters, [torch.ones_like(each) for each in gradients], allow_unused=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("use", [of_parameters, penalty, ada_hessian])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layer", LAYERS)
def test_second_derivatives_raise_on_every_path(layer: str, head: str, use: Callable[[nn.Module], None]) -> None:
    refused(RuntimeError, lambda: use(network(layer, head)), "second derivatives")


@pytest.mark.parametrize("use", [of_parameters, penalty])
@pytest.mark.parametrize("name", ["densenet121", "resnet18", "revnet38_cifar", "revnext_flat"])
def test_second_derivatives_of_whole_networks_raise(
    name: str, use: Callable[[nn.Module], None], monkeypatch: Any
) -> None:
    monkeypatch.setitem(globals(), "images", lambda: torch.randn(2, 3, 32, 32).requires_grad_())
    refused(RuntimeError, lambda: use(zoo.get(name, norm="inplace", num_classes=4)), "second derivatives")


def test_second_derivatives_of_lean_networks_raise() -> None:
    refused(RuntimeError, lambda: of_parameters(zoo.lean(network("in-place norm", "pool"))), "second derivatives")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_with_graph_are_bit_identical_to_gradients_without_one(layer: str, head: str) -> None:
    model = network(layer, head)
    results = []
    for create_graph in (False, True):
        twin = copy.deepcopy(model)
        parameters = [each for each in twin.parameters() if each.requires_grad]
        results.append(torch.autograd.grad(twin(images()).square().mean(), parameters, create_graph=create_graph))
    assert all(map(torch.equal, *results))
