"""The autograd functions of the fused activated batch norm. They save only the output and per-channel vectors.

All functions share one backward. In eager mode the output overwrites the input. Under torch.compile the output is a new
tensor, because in-place operations give wrong gradients in compiled networks; the compiler reuses the memory itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.ops.abn.kernels import kernels_for
from zoo.ops.abn.reference import Means, NormSettings, laid_out
from zoo.ops.abn.replica_group import Group
from zoo.ops.abn.statistics import means_over_group
from zoo.ops.second_derivatives import first_derivatives_only


class ActivatedBatchNorm(torch.autograd.Function):
    """z = f(g (x - mean) / sqrt(var + eps) + bias + shortcut), g = |weight| + eps, for x of shape (N, C, ...).

    The arguments after x are the shortcut and the fields of `NormSettings` and of `Statistics`; statistics get no
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
        group: Group | None,
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
        if ctx.needs_input_grad[0] and shortcut is None and ctx.group is None:
            dx, dweight, dbias = kernels.backward(z, dz, var, num_values, settings)
            return dx, None, dweight, dbias, *[None] * 8
        dz, shortcut = laid_out(dz, z), laid_out(shortcut, z)  # once for both kernels
        needs_dx = any(ctx.needs_input_grad[:2])
        means, dweight, dbias = reduce_gradients(z, dz, num_values if needs_dx else None, ctx.group, settings, shortcut)
        if needs_dx:
            dx, dshortcut = kernels.backward_apply(z, dz, var, means, settings, shortcut)
        return dx, dshortcut, dweight, dbias, *[None] * 8


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
    group: Group | None,
    settings: NormSettings,
    shortcut: Tensor | None = None,
) -> tuple[Means, Tensor | None, Tensor | None]:
    """Return the means of dy and dy x_hat over the group, and this process's dL/dweight and dL/dbias.

    ``num_values`` is the number of values per channel in the group. If it is None, so are the means.
    """
    kernels = kernels_for(z)
    if isinstance(num_values, Tensor):
        sums, dweight, dbias = kernels.reduce_gradients(z, dz, 1, settings, shortcut)
        return means_over_group(sums, num_values, group), dweight, dbias
    divisor = 1 if num_values is None else num_values
    means, dweight, dbias = kernels.reduce_gradients(z, dz, divisor, settings, shortcut)
    mean_dy, mean_dy_xhat = means.unbind()
    return None if num_values is None else (mean_dy, mean_dy_xhat), dweight, dbias
