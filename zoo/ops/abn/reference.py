"""The kernels of the fused activated batch norm in plain torch, for any device, layout and dtype.

Notation, per channel: mean m and biased variance v of x, scale g, bias b, activation f, and

    x_hat = (x - m) / sqrt(v + eps),    y = g x_hat + b + s,    z = f(y)

where s is the optional shortcut of a residual sum, of the shape and dtype of x, and g = |weight| + eps, which makes y
invertible (Rota Bulo et al., CVPR 2018, section 3; the absolute value is from the published code). Without weight
g = 1, without bias b = 0. csrc/README.md derives the backward formulas.

Half precision is computed in float32, float64 in float64. Compiled kernels are tested against these kernels.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.operators import accumulate_dtype


class NormSettings(NamedTuple):
    """The parameters of z = f(g x_hat + b): weight and bias, (C,) or None, eps, activation and its parameter."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str
    activation_param: float


Means = tuple[Tensor, Tensor] | None  # per-channel means of dy and dy x_hat


class ReferenceKernels:
    """The reference kernels. Other back ends derive from this class and override the kernels that they implement.

    x, z, their gradients and the shortcut are (N, C, ...) tensors of one shape and dtype, of any strides; vectors are
    (C,). Statistics, sums and means are computed in the accumulation dtype (`accumulate_dtype`). Kernels neither record
    autograd nor communicate between processes.
    """

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance per channel, (C,); zeros for a tensor without elements."""
        x = x.to(accumulate_dtype(x.dtype))
        if x.numel() == 0:
            return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
        var, mean = torch.var_mean(x, _reduced_dims(x), correction=0)
        return mean, var

    def track_statistics(
        self, x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `statistics`, and update the running statistics, (C,), with `update_running`."""
        mean, var = self.statistics(x)
        update_running(running_mean, running_var, mean, var, values_per_channel(x), momentum)
        return mean, var

    def local_statistics(self, x: Tensor) -> Tensor:
        """Return `statistics` and the number of values per channel as one float64 tensor, (2 C + 1,)."""
        mean, var = self.statistics(x)
        return torch.cat([mean.double(), var.double(), mean.new_full((1,), values_per_channel(x), dtype=torch.float64)])

    def group_statistics(
        self,
        gathered: Tensor,
        dtype: torch.dtype,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the statistics of a process group: mean and biased variance, (C,), and the number of values.

        ``gathered`` is (processes, 2 C + 1), one row of `local_statistics` per process. The number of values per
        channel is zero-dimensional; all results have ``dtype``. Running statistics that are not None are updated with
        `update_running`.
        """
        channels = gathered.shape[1] // 2
        means, variances, counts = gathered.split([channels, channels, 1], dim=1)
        total = counts.sum()
        divisor = total.clamp(min=1)  # avoids division by zero; the caller raises an error if there are no values
        mean = (counts * means).sum(0) / divisor
        var = (counts * (variances + (means - mean).square())).sum(0) / divisor
        mean, var, num_values = mean.to(dtype), var.to(dtype), total.to(dtype)
        if running_mean is not None and running_var is not None:
            update_running(running_mean, running_var, mean, var, num_values, momentum)
        return mean, var, num_values

    def apply(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> Tensor:
        """Return z in a new tensor of the shape and dtype of x."""
        # The last operation must return a new tensor. If it returned its argument, as in-place operations and
        # conversions to the same dtype do, torch 2.11 would compile this with zero gradients.
        y = (x.to(accumulate_dtype(x.dtype)) - _per_channel(mean, x)) * _per_channel(_slope(var, settings), x)
        if settings.bias is not None:
            y = y + _per_channel(settings.bias, x)
        if shortcut is not None:
            y = y + shortcut
        z = activate(y, *settings[3:], inplace=False)
        return z if z.dtype == x.dtype else z.to(x.dtype)

    def apply_(
        self, x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> None:
        """Overwrite x with z."""
        if x.dtype != accumulate_dtype(x.dtype):
            x.copy_(self.apply(x, mean, var, settings, shortcut))
            return
        x.sub_(_per_channel(mean, x)).mul_(_per_channel(_slope(var, settings), x))
        if settings.bias is not None:
            x.add_(_per_channel(settings.bias, x))
        if shortcut is not None:
            x.add_(shortcut)
        activate(x, *settings[3:], inplace=True)

    def backward(
        self, z: Tensor, dz: Tensor, var: Tensor, num_values: int | None, settings: NormSettings
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return dL/dx, dL/dweight and dL/dbias for one process and no shortcut.

        ``num_values`` is the number of values per channel, or None if the statistics do not depend on x. dL/dx is a new
        tensor of the shape and dtype of z; the others are (C,) in the dtypes of weight and bias, or None without them.
        """
        dz = laid_out(dz, z)
        divisor = 1 if num_values is None else num_values
        means, dweight, dbias = self.reduce_gradients(z, dz, divisor, settings)
        mean_dy, mean_dy_xhat = means.unbind()
        dx, _ = self.backward_apply(z, dz, var, None if num_values is None else (mean_dy, mean_dy_xhat), settings)
        return dx, dweight, dbias

    def reduce_gradients(
        self, z: Tensor, dz: Tensor, divisor: int, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sums of `backward_reduce` divided by ``divisor``, (2, C), and dL/dweight and dL/dbias.

        The gradients are (C,) in the dtypes of weight and bias, or None without them.
        """
        sum_dy, sum_dy_xhat = self.backward_reduce(z, dz, settings, shortcut)
        gradients = parameter_gradients(sum_dy, sum_dy_xhat, settings.weight, settings.bias)
        return torch.stack([sum_dy, sum_dy_xhat]) / divisor, *gradients

    def backward_reduce(
        self, z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return sum(dy) and sum(dy x_hat) per channel, (C,)."""
        x_hat, dy = _invert(z, dz, settings, shortcut)
        dims = _reduced_dims(z)
        return dy.sum(dims), (dy * x_hat).sum(dims)

    def backward_apply(
        self, z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return dL/dx = g / sqrt(v + eps) (dy - mean(dy) - x_hat mean(dy x_hat)), and dL/ds = dy with a shortcut.

        Both are new tensors of the shape and dtype of z. ``means`` are the two means, (C,). None means that the
        statistics do not depend on x: dL/dx = g / sqrt(v + eps) dy.
        """
        x_hat, dy = _invert(z, dz, settings, shortcut)
        dshortcut = None if shortcut is None else dy.to(z.dtype, copy=True)
        if means is not None:
            dy = dy - _per_channel(means[0], z) - x_hat * _per_channel(means[1], z)
        return (dy * _per_channel(_slope(var, settings), z)).to(z.dtype), dshortcut


def values_per_channel(x: Tensor) -> int:
    """Return N times the spatial size of an (N, C, ...) tensor."""
    return x.numel() // x.shape[1] if x.shape[1] else 0


@torch.no_grad()
def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    num_values: int | Tensor,
    momentum: float | Tensor,
) -> None:
    """Update the running statistics in place: r becomes r + momentum (batch - r).

    The running variance is unbiased: the variance of the batch is multiplied by n / (n - 1).
    """
    unbiased = var * (num_values / (num_values - 1))
    for running, new in ((running_mean, mean), (running_var, unbiased)):
        weight = momentum.to(running.dtype) if isinstance(momentum, Tensor) else momentum
        running.lerp_(new.to(running.dtype), weight)


def parameter_gradients(
    sum_dy: Tensor, sum_dy_xhat: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return dL/dweight = sign(weight) sum(dy x_hat), the sign of 0 being +1, and dL/dbias = sum(dy)."""
    dweight = None if weight is None else torch.where(weight < 0, -sum_dy_xhat, sum_dy_xhat)
    return of_dtype(dweight, weight), of_dtype(sum_dy, bias)


def of_dtype(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient in the dtype of its parameter, or None without parameter."""
    if gradient is None or parameter is None:
        return None
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def laid_out(x: MaybeTensor, like: Tensor) -> MaybeTensor:
    """Return x in the layout of ``like``, a tensor of the same shape; copies if needed. None for None.

    Returns x itself under torch.compile, which chooses layouts on its own.
    """
    if x is None or torch.compiler.is_compiling() or x.stride() == like.stride():
        return x
    return torch.empty_like(like).copy_(x)


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
