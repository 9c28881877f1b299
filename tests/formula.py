"""The formula of the activated batch norm in operations that autograd differentiates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


def activated_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    statistics: tuple[Tensor, Tensor] | None = None,
    signed: bool = False,
    shortcut: Tensor | None = None,
) -> Tensor:
    """Return f(g x_hat + b + shortcut), g = |w| + eps or w; ``statistics`` (mean, var) instead of the batch's."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    dims = [0, *range(2, x.dim())]
    mean, var = statistics or (x.mean(dims), (x - x.mean(dims, keepdim=True)).square().mean(dims))
    y = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + eps)
    if weight is not None:
        # where(), unlike abs(), has derivative +1 at 0, as published
        scale = weight if signed else torch.where(weight < 0, -weight, weight) + eps
        y = y * scale.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    if shortcut is not None:
        y = y + shortcut
    if activation == "leaky_relu":
        return torch.where(y < 0, y * activation_param, y)
    if activation == "elu":
        return F.elu(y, activation_param)
    return torch.relu(y) if activation == "relu" else y


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest deviation in units of the largest expected value (1 where that is 0)."""
    expected = expected.double()
    size = expected.abs().max().item() if expected.numel() else 0.0
    return ((actual.double() - expected).abs().max().item() if expected.numel() else 0.0) / (size or 1.0)


def worst_error(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest `relative_error` of the tensors in two sequences of the same length."""
    return max(relative_error(*pair) for pair in zip(actual, expected, strict=True))
