"""Lean training is bit-identical to plain training in common training loops."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from tests.remat.programs import Checkpointed, are_equal, gradients, images, network
from zoo.remat import Rematerializer
from zoo.remat import lean as lean_module
from zoo.remat.lean import lean

SIZE_PX = 12
Way = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], list[Tensor]]


@pytest.fixture(autouse=True)
def keep_nothing_for_being_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lean modules record their small maps too, so that recipes are followed at all."""
    monkeypatch.setattr(
        lean_module, "Rematerializer", lambda *args, **kw: Rematerializer(*args, **kw, smallest_bytes=0)
    )


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], steps: int = 2, micro_steps: int = 1) -> list[Tensor]:
    """Return the losses of some steps of SGD, and the parameters and buffers after them."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            loss = forward(torch.randn(2, 3, SIZE_PX, SIZE_PX)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return [*losses, *(each.detach().clone() for each in model.state_dict().values())]


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


def interleaved(model: nn.Module, lean: Any) -> list[Tensor]:
    """Two networks, whose passes forward and backward alternate, and a tensor that both graphs use."""
    other = lean(copy.deepcopy(model))
    lean(model)
    x = images().requires_grad_()
    first = model(x)
    second = other(x * first.mean())
    third = model(2 * x)
    first.square().sum().backward(retain_graph=True)
    third.square().sum().backward()
    second.square().sum().backward()
    return [x.grad, *gradients(model, other)]


def in_threads(model: nn.Module, lean: Any) -> list[Tensor]:
    """Two threads that train separate networks."""
    models = [lean(copy.deepcopy(model)) for _ in range(2)]
    x = images()
    losses: list[Tensor] = []

    def forward(model: nn.Module) -> None:
        losses.append(model(x).square().sum())
        losses[-1].backward()

    threads = [threading.Thread(target=forward, args=(each,)) for each in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*losses, *gradients(*models)]


def shared(model: nn.Module, lean: Any) -> list[Tensor]:
    """A block that is used twice, lean by itself inside of a lean network."""
    model[2] = model[1]
    lean(model[1])
    return train(lean(model), model)


def checkpointed_inside(model: nn.Module, lean: Any) -> list[Tensor]:
    model[1] = Checkpointed(model[1])
    return train(lean(model), model)


def with_inplace_norms(_: nn.Module, lean: Any) -> list[Tensor]:
    model = lean(zoo.get("resnet32_cifar", norm="inplace"))
    return train(model, torch.autocast("cpu", torch.bfloat16)(model))


WAYS: dict[str, Way] = {
    "hooked": hooked, "functional_call": by_function, "interleaved": interleaved, "in-place norms": with_inplace_norms,
    "threads": in_threads, "shared": shared, "checkpoint inside": checkpointed_inside,
    "accumulation": lambda model, lean: train(lean(model), model, micro_steps=3),
    "checkpoint around": lambda model, lean: train(model, lambda x: checkpoint(lean(model), x, use_reentrant=False)),
    "reentrant checkpoint around": lambda model, lean: train(
        model, lambda x: checkpoint(lean(model), x.requires_grad_(), use_reentrant=True)
    ),
    "bfloat16": lambda model, lean: train(lean(model.bfloat16()), lambda x: model(x.bfloat16())),
    "channels_last": lambda model, lean: train(
        lean(model.to(memory_format=torch.channels_last)), lambda x: model(x.to(memory_format=torch.channels_last))
    ),
    "evaluation": lambda model, lean: train(lean(model.eval()), model),
    "frozen trunk": lambda model, lean: [model[1].requires_grad_(False), *train(lean(model), model)][1:],
    "autocast": lambda model, lean: train(lean(model), torch.autocast("cpu", torch.bfloat16)(model)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_training_is_bit_identical(way: str) -> None:
    expected = WAYS[way](network(), lambda module: module)
    found = WAYS[way](network(), lean)
    assert expected
    assert are_equal(found, expected)
