"""The kernels in plain torch, for any device, layout and dtype. Compiled kernels are tested against them.

kernels.py defines the interface and the notation. Half precision is computed in float32, float64 in float64.

Tested by tests/ops/abn/test_functional.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.abn.kernels import Means, NormSettings, accumulate_dtype

backward = None
track_statistics = None
reduce_gradients = None
local_statistics = None
group_statistics = None


def unavailable_reason() -> None:
    """Return None: always available."""


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, shape (C,); zeros for a tensor without elements."""
    x = x.to(accumulate_dtype(x.dtype))
    if x.numel() == 0:
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    var, mean = torch.var_mean(x, _reduced_dims(x), correction=0)
    return mean, var


def apply(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> Tensor:
    """Return z in a new tensor of the dtype of x."""
    # The last operation must return a new tensor. If it returned its argument, as in-place operations and conversions
    # to the same dtype do, torch 2.11 would compile this with zero gradients.
    y = (x.to(accumulate_dtype(x.dtype)) - _per_channel(mean, x)) * _per_channel(_slope(var, settings), x)
    if settings.bias is not None:
        y = y + _per_channel(settings.bias, x)
    if shortcut is not None:
        y = y + shortcut
    z = activate(y, *settings[3:], inplace=False)
    return z if z.dtype == x.dtype else z.to(x.dtype)


def apply_(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> None:
    """Overwrite x with z."""
    if x.dtype != accumulate_dtype(x.dtype):
        x.copy_(apply(x, mean, var, settings, shortcut))
        return
    x.sub_(_per_channel(mean, x)).mul_(_per_channel(_slope(var, settings), x))
    if settings.bias is not None:
        x.add_(_per_channel(settings.bias, x))
    if shortcut is not None:
        x.add_(shortcut)
    activate(x, *settings[3:], inplace=True)


def backward_reduce(
    z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy x_hat) per channel, shape (C,), in the accumulation dtype."""
    x_hat, dy = _invert(z, dz, settings, shortcut)
    dims = _reduced_dims(z)
    return dy.sum(dims), (dy * x_hat).sum(dims)


def backward_apply(
    z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dx = g / sqrt(v + eps) (dy - mean(dy) - x_hat mean(dy x_hat)), and dL/ds = dy with a shortcut."""
    x_hat, dy = _invert(z, dz, settings, shortcut)
    dshortcut = None if shortcut is None else dy.to(z.dtype, copy=True)
    if means is not None:
        dy = dy - _per_channel(means[0], z) - x_hat * _per_channel(means[1], z)
    return (dy * _per_channel(_slope(var, settings), z)).to(z.dtype), dshortcut


def _reduced_dims(x: Tensor) -> list[int]:
    """Return all dimensions except the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a (C,) vector so that it broadcasts over ``like`` of shape (N, C, ...)."""
    return vector.to(accumulate_dtype(like.dtype)).view(1, -1, *[1] * (like.dim() - 2))


def _scale(weight: Tensor, eps: float) -> Tensor:
    return weight.to(accumulate_dtype(weight.dtype)).abs() + eps


def _slope(var: Tensor, settings: NormSettings) -> Tensor:
    """Return dy/dx at fixed statistics, g / sqrt(v + eps), per channel."""
    inverse_std = torch.rsqrt(var + settings.eps)
    return inverse_std if settings.weight is None else inverse_std * _scale(settings.weight, settings.eps)


def activate(y: Tensor, activation: str, activation_param: float, inplace: bool) -> Tensor:
    """Return f(y), for relu, leaky_relu, elu or identity."""
    if activation == "relu":
        return F.relu(y, inplace)
    if activation == "leaky_relu":
        return F.leaky_relu(y, activation_param, inplace)
    if activation == "elu":
        return F.elu(y, activation_param, inplace)
    return y


def _invert(z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x_hat and dy = dL/dy, recovered from the output z and its gradient dz."""
    y = z.to(accumulate_dtype(z.dtype))
    dy = dz.to(y.dtype)
    negative = y < 0
    if settings.activation == "leaky_relu":
        dy = torch.where(negative, dy * settings.activation_param, dy)
        y = torch.where(negative, y / settings.activation_param, y)
    elif settings.activation == "elu":
        # The pre-image of a saturated output, -alpha, is -inf. The pre-image of the next larger number is used
        # instead: it is multiplied by the gradient z + alpha = 0, and the product with a finite number is 0.
        dy = torch.where(negative, dy * (y + settings.activation_param), dy)
        ratio = (y / settings.activation_param).clamp(-1 + torch.finfo(z.dtype).eps / 2, 0)
        y = torch.where(negative, torch.log1p(ratio), y)
    if shortcut is not None:
        y = y - shortcut
    if settings.bias is not None:
        y = y - _per_channel(settings.bias, z)
    divisor = _divisor(settings, z.dtype)
    return y if divisor is None else y / _per_channel(divisor, z), dy


def _divisor(settings: NormSettings, dtype: torch.dtype) -> Tensor | None:
    """Return the divisor of y - b that gives x_hat, (C,): g, or infinity where x_hat would be pure rounding error.

    This is where g is smaller than the error of y near b for a z of ``dtype``. x_hat is then set to 0, with an error of
    at most 1 (csrc/README.md). None means 1.
    """
    weight, bias = settings.weight, settings.bias
    scale = None if weight is None else _scale(weight, settings.eps)
    if bias is None:
        return scale
    bias = bias.to(accumulate_dtype(bias.dtype) if scale is None else scale.dtype)
    scale = torch.ones_like(bias) if scale is None else scale
    error = bias.abs()
    if settings.activation == "elu":  # the inverse of ELU is steeper than 1 below 0
        error = torch.where(bias < 0, torch.expm1(-bias - 2 * scale), error)
    return scale.masked_fill(scale < torch.finfo(dtype).eps / 2 * error, torch.inf)
