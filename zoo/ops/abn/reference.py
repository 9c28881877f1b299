"""The four kernels of the fused activated batch norm in plain torch, for any device, layout and dtype.

Notation, per channel: mean m and biased variance v of x, scale g, shift b, activation f, and

    x_hat = (x - m) / sqrt(v + eps),    y = g x_hat + b + s,    z = f(y)

where s is the shortcut of a residual sum, of the shape and dtype of x, or nothing, and g = |weight| + eps, so that y
can be inverted (Rota Bulo et al., CVPR 2018, section 3; the absolute value is that of the published code).  Without
weight and bias g = 1 and b = 0.  Channels are dimension 1 of an (N, C, ...) tensor.  Half-precision tensors are
computed in float32, float64 ones in float64.  The derivation is in csrc/README.md.

A back end may have two functions more, ``backward`` and ``track_statistics``: in one call what takes several of these
and some arithmetic on vectors.  native.py has them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Form(NamedTuple):
    """What turns x_hat into z and back: weight and bias of shape (C,) or None, eps, activation and its parameter."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str
    activation_param: float


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics and sums of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, shape (C,); zeros for a tensor without elements."""
    x = x.to(accumulate_dtype(x.dtype))
    if x.numel() == 0:
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    var, mean = torch.var_mean(x, _reduced_dims(x), correction=0)
    return mean, var


def apply(x: Tensor, mean: Tensor, var: Tensor, form: Form, shortcut: Tensor | None = None) -> Tensor:
    """Return z in a new tensor of the dtype of x."""
    # Nothing that returns its own argument may come last, neither an operation in place nor a conversion to the same
    # dtype: compiled by torch 2.11 all gradients would be zero.
    y = (x.to(accumulate_dtype(x.dtype)) - _per_channel(mean, x)) * _per_channel(_slope(var, form), x)
    if form.bias is not None:
        y = y + _per_channel(form.bias, x)
    if shortcut is not None:
        y = y + shortcut
    z = _activate(y, form, inplace=False)
    return z if z.dtype == x.dtype else z.to(x.dtype)


def apply_(x: Tensor, mean: Tensor, var: Tensor, form: Form, shortcut: Tensor | None = None) -> None:
    """Overwrite x with z."""
    if x.dtype != accumulate_dtype(x.dtype):
        x.copy_(apply(x, mean, var, form, shortcut))
        return
    x.sub_(_per_channel(mean, x)).mul_(_per_channel(_slope(var, form), x))
    if form.bias is not None:
        x.add_(_per_channel(form.bias, x))
    if shortcut is not None:
        x.add_(shortcut)
    _activate(x, form, inplace=True)


def backward_reduce(z: Tensor, dz: Tensor, form: Form, shortcut: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return sum(dy) and sum(dy x_hat) per channel, shape (C,), in the accumulation dtype."""
    x_hat, dy = _invert(z, dz, form, shortcut)
    dims = _reduced_dims(z)
    return dy.sum(dims), (dy * x_hat).sum(dims)


def backward_apply(
    z: Tensor,
    dz: Tensor,
    var: Tensor,
    means: tuple[Tensor, Tensor] | None,
    form: Form,
    shortcut: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dx = g / sqrt(v + eps) (dy - mean(dy) - x_hat mean(dy x_hat)), and dL/ds = dy if there is a shortcut.

    Both are new tensors.  ``means`` holds the two means; None stands for statistics that do not depend on x: then
    dL/dx is g / sqrt(v + eps) dy.
    """
    x_hat, dy = _invert(z, dz, form, shortcut)
    dshortcut = None if shortcut is None else dy.to(z.dtype, copy=True)
    if means is not None:
        dy = dy - _per_channel(means[0], z) - x_hat * _per_channel(means[1], z)
    return (dy * _per_channel(_slope(var, form), z)).to(z.dtype), dshortcut


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """View a (C,) vector so that it broadcasts over ``like`` of shape (N, C, ...)."""
    return vector.to(accumulate_dtype(like.dtype)).view(1, -1, *[1] * (like.dim() - 2))


def _scale(weight: Tensor, eps: float) -> Tensor:
    return weight.to(accumulate_dtype(weight.dtype)).abs() + eps


def _slope(var: Tensor, form: Form) -> Tensor:
    """Return dy/dx at fixed statistics, g / sqrt(v + eps), per channel."""
    inverse_std = torch.rsqrt(var + form.eps)
    return inverse_std if form.weight is None else inverse_std * _scale(form.weight, form.eps)


def _activate(y: Tensor, form: Form, inplace: bool) -> Tensor:
    if form.activation == "leaky_relu":
        return F.leaky_relu(y, form.activation_param, inplace)
    if form.activation == "elu":
        return F.elu(y, form.activation_param, inplace)
    return y


def _invert(z: Tensor, dz: Tensor, form: Form, shortcut: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x_hat and dy = dL/dy, recovered from the output z and its gradient dz."""
    y = z.to(accumulate_dtype(z.dtype))
    dy = dz.to(y.dtype)
    negative = y < 0
    if form.activation == "leaky_relu":
        dy = torch.where(negative, dy * form.activation_param, dy)
        y = torch.where(negative, y / form.activation_param, y)
    elif form.activation == "elu":
        # A saturated output is -alpha, whose pre-image is -inf. The pre-image of the next larger number stands in:
        # its gradient z + alpha is zero, and zero times a finite number stays zero.
        dy = torch.where(negative, dy * (y + form.activation_param), dy)
        ratio = (y / form.activation_param).clamp(-1 + torch.finfo(z.dtype).eps / 2, 0)
        y = torch.where(negative, torch.log1p(ratio), y)
    if shortcut is not None:
        y = y - shortcut
    if form.bias is not None:
        y = y - _per_channel(form.bias, z)
    divisor = _divisor(form, z.dtype)
    return y if divisor is None else y / _per_channel(divisor, z), dy


def _divisor(form: Form, dtype: torch.dtype) -> Tensor | None:
    """Return what y - b is divided by to give x_hat: g, and infinity where x_hat could be nothing but rounding.

    That is so where g is below the error with which y was stored near b in a z of ``dtype``; x_hat is then 0, which is
    wrong by 1 at most (csrc/README.md).  None stands for 1.
    """
    weight, bias = form.weight, form.bias
    scale = None if weight is None else _scale(weight, form.eps)
    if bias is None:
        return scale
    bias = bias.to(accumulate_dtype(bias.dtype) if scale is None else scale.dtype)
    scale = torch.ones_like(bias) if scale is None else scale
    error = bias.abs()
    if form.activation == "elu":  # whose inverse is steeper than 1 below 0
        error = torch.where(bias < 0, torch.expm1(-bias - 2 * scale), error)
    return scale.masked_fill(scale < torch.finfo(dtype).eps / 2 * error, torch.inf)
