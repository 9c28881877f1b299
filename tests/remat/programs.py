"""Programs of tensor operations, run with and without recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.remat import Rematerializer


def gradients_of(
    program: Callable[..., Tensor], inputs: Sequence[Tensor], with_recipes: bool, **options: Any
) -> list[Tensor]:
    """Return a program's output, and its gradients by fresh copies of the ``inputs`` that are of a floating type."""
    torch.manual_seed(0)
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    if with_recipes:
        with Rematerializer(**{"smallest_bytes": 0, **options}):
            out = program(*leaves)
    else:
        out = program(*leaves)
    before = out.detach().clone()
    out.float().square().sum().backward()
    return [before, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same(program: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> None:
    """Assert that a program has the same output and gradients, bit for bit, with recipes and without."""
    expected = gradients_of(program, inputs, with_recipes=False)
    found = gradients_of(program, inputs, with_recipes=True, **options)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def runs(program: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Return whether torch has the operations of a program for the dtype, layout and size of its inputs."""
    try:
        gradients_of(program, inputs, with_recipes=False)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def step(module: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the output of a training step, the images' gradient, all gradients, and all buffers after it."""
    torch.manual_seed(1)
    images = images.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(images)
    before = out.detach().clone()
    out.float().square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return [before, images.grad, *gradients, *(buffer.clone() for buffer in module.buffers())]
