"""The autograd of the fused activated batch norm: it keeps its output and per-channel vectors, nothing else.

One Function with two forms and one backward.  In eager mode the output overwrites the input.  Under torch.compile it is
a new tensor, because in-place forms give wrong gradients in compiled networks; the compiler reuses the memory itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops.abn.backend import kernels
from zoo.ops.abn.reference import Form


class ActivatedBatchNorm(torch.autograd.Function):
    """z = f(g (x - mean) / sqrt(var + eps) + bias), g = |weight| + eps, for x of shape (N, C, ...).

    ``mean`` and ``var`` are inputs without gradient.  ``count`` is the number of values per channel that they were
    taken over (an int, or a tensor for a synchronised layer), and None for statistics that do not depend on x.
    ``group`` is the process group to sum over in backward, or None.  With ``inplace`` x is overwritten and returned.
    The derivative of \\|weight\\| at 0 is +1, as published.  Differentiating twice raises RuntimeError.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: int | Tensor | None,
        eps: float,
        activation: str,
        activation_param: float,
        inplace: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        form = Form(weight, bias, eps, activation, activation_param)
        if not inplace:
            return kernels.apply(x, mean, var, form)
        kernels.apply_(x, mean, var, form)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, _, var, count, *settings, inplace, group = inputs
        if inplace:
            ctx.mark_dirty(x)
        count_tensor = count if isinstance(count, Tensor) else None
        ctx.save_for_backward(output, weight, bias, var, count_tensor)
        ctx.count, ctx.settings, ctx.group = None if count_tensor is not None else count, settings, group

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, bias, var, count_tensor = ctx.saved_tensors
        form = Form(weight, bias, *ctx.settings)
        count = ctx.count if count_tensor is None else count_tensor
        sum_dy, sum_dy_xhat = kernels.backward_reduce(z, dz, form)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            means = None if count is None else _means(sum_dy, sum_dy_xhat, count, ctx.group)
            dx = kernels.backward_apply(z, dz, var, means, form)
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = torch.where(weight < 0, -sum_dy_xhat, sum_dy_xhat).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = sum_dy.to(bias.dtype)
        return dx, dweight, dbias, *[None] * 8


def _means(
    sum_dy: Tensor, sum_dy_xhat: Tensor, count: int | Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Divide the two sums, taken over the whole group in one all-reduce, by the count."""
    if group is None:
        return sum_dy / count, sum_dy_xhat / count
    sums = torch.stack([sum_dy, sum_dy_xhat])
    dist.all_reduce(sums, group=group)
    mean_dy, mean_dy_xhat = sums / count
    return mean_dy, mean_dy_xhat
