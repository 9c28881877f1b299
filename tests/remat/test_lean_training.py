"""Lean training is bit-identical to plain training in common training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from tests.remat.programs import are_equal, images, network, train_steps
from zoo.remat import Rematerializer
from zoo.remat import _lean as lean_module
from zoo.remat._lean import lean

SIZE_PX = 12
Way = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], list[Tensor]]


@pytest.fixture(autouse=True)
def keep_nothing_for_being_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lean modules record their small maps too, so that recipes are followed at all."""
    monkeypatch.setattr(
        lean_module, "Rematerializer", lambda *args, **kw: Rematerializer(*args, **kw, smallest_bytes=0)
    )


def train(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the outputs of some training steps, and the state of the module after them."""
    return train_steps(model, lambda number: forward(torch.randn(2, 3, SIZE_PX, SIZE_PX)), num_steps=2)


def hooked(model: nn.Module, lean: Any) -> list[Tensor]:
    """Train with hooks that record features, change features in place, and record gradients."""
    features: list[Tensor] = []
    lean(model)
    model[1].norms[0].register_forward_hook(lambda module, args, out: features.append(out.detach().clone()))
    model[1].norms[1].register_forward_hook(lambda module, args, out: out.mul_(0.5))
    model[2].register_forward_hook(lambda module, args, out: 2 * out)
    model[2].register_full_backward_hook(lambda module, dx, dy: features.append(dx[0].clone()))
    model.register_forward_hook(lambda module, args, out: out + 1)
    return [*train(model, model), *features]


def by_function(model: nn.Module, lean: Any) -> list[Tensor]:
    lean(model)
    weights = {name: (1.5 * each).detach().requires_grad_() for name, each in model.named_parameters()}
    torch.func.functional_call(model, weights, images()).square().sum().backward()
    return [each.grad for each in weights.values()]


def shared(model: nn.Module, lean: Any) -> list[Tensor]:
    """A block that is used twice, lean by itself inside of a lean network."""
    model[2] = model[1]
    lean(model[1])
    return train(lean(model), model)


def with_inplace_norms(_: nn.Module, lean: Any) -> list[Tensor]:
    model = lean(zoo.get("resnet32_cifar", norm="inplace"))
    return train(model, torch.autocast("cpu", torch.bfloat16)(model))


WAYS: dict[str, Way] = {
    "hooked": hooked, "functional_call": by_function, "in-place norms": with_inplace_norms, "shared": shared,
    "checkpoint around": lambda model, lean: train(model, lambda x: checkpoint(lean(model), x, use_reentrant=False)),
    "reentrant checkpoint around": lambda model, lean: train(
        model, lambda x: checkpoint(lean(model), x.requires_grad_(), use_reentrant=True)
    ),
    "bfloat16": lambda model, lean: train(lean(model.bfloat16()), lambda x: model(x.bfloat16())),
    "channels_last": lambda model, lean: train(
        lean(model.to(memory_format=torch.channels_last)), lambda x: model(x.to(memory_format=torch.channels_last))
    ),
    "evaluation": lambda model, lean: train(lean(model.eval()), model),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_training_is_bit_identical(way: str) -> None:
    expected = WAYS[way](network(), lambda module: module)
    found = WAYS[way](network(), lean)
    assert expected
    assert are_equal(found, expected)
