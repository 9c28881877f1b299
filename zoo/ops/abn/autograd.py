"""The autograd functions of the fused activated batch norm, which save only the output and per-channel vectors.

All functions share one backward. In eager mode the output overwrites the input. Under torch.compile the output is a new
tensor, because in-place operations give wrong gradients in compiled networks; the compiler reuses the memory itself.

Tested by tests/ops/abn/test_functional.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.ops.abn.backend import kernels_for
from zoo.ops.abn.kernels import Means, NormSettings, laid_out
from zoo.ops.abn.statistics import means_over_group
from zoo.ops.second_derivatives import first_derivatives_only


class ActivatedBatchNorm(torch.autograd.Function):
    """z = f(g (x - mean) / sqrt(var + eps) + bias + shortcut), g = |weight| + eps, for x of shape (N, C, ...).

    The arguments after x are the shortcut, the fields of `NormSettings` and of `Statistics`, which get no
    gradients. Backward sums over the group. The shortcut (shape and dtype of x, or None) is saved for backward instead
    of the residual sum. With ``inplace``, x is overwritten and returned.
    The derivative of \\|weight\\| at 0 is +1, as published. Second derivatives raise RuntimeError.
    """

    @staticmethod
    def forward(
        x: Tensor,
        shortcut: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        activation: str,
        activation_param: float,
        mean: Tensor,
        var: Tensor,
        num_values: int | Tensor | None,
        group: dist.ProcessGroup | None,
        inplace: bool,
    ) -> Tensor:
        settings = NormSettings(weight, bias, eps, activation, activation_param)
        if not inplace:
            return kernels_for(x).apply(x, mean, var, settings, shortcut)
        kernels_for(x).apply_(x, mean, var, settings, shortcut)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, shortcut, weight, bias, eps, activation, activation_param, _, var, num_values, group, inplace = inputs
        if inplace:
            ctx.mark_dirty(x)
        num_tensor = num_values if isinstance(num_values, Tensor) else None
        ctx.save_for_backward(output, shortcut, weight, bias, var, num_tensor)
        ctx.num_values, ctx.group = num_values if num_tensor is None else None, group
        ctx.scalars = eps, activation, activation_param

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        z, shortcut, weight, bias, var, num_tensor = ctx.saved_tensors
        settings = NormSettings(weight, bias, *ctx.scalars)
        num_values = ctx.num_values if num_tensor is None else num_tensor
        kernels = kernels_for(z)
        dx: Tensor | None = None
        dshortcut: Tensor | None = None
        one_process = ctx.group is None and num_tensor is None
        if kernels.backward is not None and ctx.needs_input_grad[0] and shortcut is None and one_process:
            dx, dweight, dbias = kernels.backward(z, dz, var, num_values is not None, settings)
            return dx, None, _of_dtype(dweight, weight), _of_dtype(dbias, bias), *[None] * 8
        if not torch.compiler.is_compiling():  # once for both kernels; the compiler chooses layouts itself
            dz, shortcut = laid_out(dz, z), laid_out(shortcut, z)
        needs_dx = any(ctx.needs_input_grad[:2])
        means, *gradients = reduce_gradients(z, dz, num_values if needs_dx else None, ctx.group, settings, shortcut)
        if needs_dx:
            dx, dshortcut = kernels.backward_apply(z, dz, var, means, settings, shortcut)
        return dx, dshortcut, *gradients, *[None] * 8


class EagerBatchNorm(torch.autograd.Function):
    """`ActivatedBatchNorm` for plain eager mode: torch calls a forward that takes ``ctx`` with less overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = ActivatedBatchNorm.forward(*inputs)
        ActivatedBatchNorm.setup_context(ctx, inputs, output)
        return output

    backward: Any = staticmethod(ActivatedBatchNorm.backward)


def reduce_gradients(
    z: Tensor,
    dz: Tensor,
    num_values: int | Tensor | None,
    group: dist.ProcessGroup | None,
    settings: NormSettings,
    shortcut: Tensor | None = None,
) -> tuple[Means, Tensor | None, Tensor | None]:
    """Return the means of dy and dy x_hat over the group, and this process's dL/dweight and dL/dbias.

    ``num_values`` is the number of values per channel in the group. If it is None, so are the means.
    """
    kernels = kernels_for(z)
    if kernels.reduce_gradients is None:
        sum_dy, sum_dy_xhat = kernels.backward_reduce(z, dz, settings, shortcut)
        means = None if num_values is None else means_over_group(sum_dy, sum_dy_xhat, num_values, group)
        return means, *parameter_gradients(sum_dy, sum_dy_xhat, settings.weight, settings.bias)
    divisor = num_values if group is None and isinstance(num_values, (int, torch.SymInt)) else 1
    sums, dweight, dbias = kernels.reduce_gradients(z, dz, divisor, settings, shortcut)
    if num_values is not None and group is not None:
        dist.all_reduce(sums, group=group)
        sums = sums / num_values
    mean_dy, mean_dy_xhat = sums.unbind()
    return None if num_values is None else (mean_dy, mean_dy_xhat), dweight, dbias


def parameter_gradients(
    sum_dy: Tensor, sum_dy_xhat: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return dL/dweight = sign(weight) sum(dy x_hat), the sign of 0 being +1, and dL/dbias = sum(dy)."""
    dweight = None if weight is None else torch.where(weight < 0, -sum_dy_xhat, sum_dy_xhat)
    return _of_dtype(dweight, weight), _of_dtype(sum_dy, bias)


def _of_dtype(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient in the dtype of its parameter, or None without parameter."""
    if gradient is None or parameter is None:
        return None
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
