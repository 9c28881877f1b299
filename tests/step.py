"""A training step, for the tests that compare the steps of two modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def loss_of(output: Tensor | list[Tensor]) -> Tensor:
    """Return a loss, at least in float32, whose gradient does not vanish after a norm."""
    losses = []
    for each in output if isinstance(output, list) else [output]:
        each = each.to(torch.promote_types(each.dtype, torch.float32))
        losses.append((each * each.detach().cos()).mean())
    return torch.stack(losses).sum()


def step(module: nn.Module, images: Tensor, autocast: bool = False) -> list[Tensor]:
    """Return the outputs of a training step, the gradients of images and parameters, and the buffers after it."""
    torch.manual_seed(1)  # the same dropout
    images = images.detach().clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module(images)
    outputs = [each.detach().clone() for each in (output if isinstance(output, list) else [output])]
    loss_of(output).backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*outputs, images.grad, *gradients, *(buffer.clone() for buffer in module.buffers())]
