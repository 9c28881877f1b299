"""Builds variants of networks for the tests of `zoo.check`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zoo.memory.check import Check

Variant = Callable[[nn.Module], nn.Module]


class Wrapped(nn.Module):
    """Runs a function of itself and the inputs in place of a module, whose parameters get other names.

    Attributes:
    - `calls`: number of calls, including the running one.
    - `kept`: a value that the function keeps for later calls; None at first.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.run = module, run
        self.calls, self.kept = 0, None

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.calls += 1
        return self.run(self, *args, **keywords)


def around(run: Callable[..., Any]) -> Variant:
    """Return a variant that runs a function in place of the network."""
    return functools.partial(Wrapped, run=run)


def replacing(kind: type[nn.Module], run: Callable[..., Any]) -> Variant:
    """Return a variant that runs a function in place of the modules of a class in a sequence."""
    return lambda model: nn.Sequential(*(Wrapped(each, run) if isinstance(each, kind) else each for each in model))


def changing(change: Callable[[Any], object]) -> Variant:
    """Return a variant that is the network itself after a change."""

    def variant(model: nn.Module) -> nn.Module:
        change(model)
        return model

    return variant


def recompute(tensor: Tensor, again: Callable[[], Tensor]) -> saved_tensors_hooks:
    """Computes a tensor again in backward instead of saving it."""
    memory, shape = tensor.data_ptr(), tensor.shape

    def unpack(saved: Tensor | None) -> Tensor:
        with torch.no_grad():
            return again() if saved is None else saved

    return saved_tensors_hooks(
        lambda saved: None if saved.data_ptr() == memory and saved.shape == shape else saved, unpack
    )


def assert_found(check: Check, text: str) -> None:
    """Assert that a check finds a difference whose description begins with ``text``, and that its report is short."""
    assert check.same is False
    assert str(check.difference).startswith(text)
    assert len(str(check).splitlines()) <= 11
