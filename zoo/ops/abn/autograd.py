"""The autograd of the fused activated batch norm: it keeps its output and per-channel vectors, nothing else.

One Function with two forms and one backward.  In eager mode the output overwrites the input.  Under torch.compile it is
a new tensor, because in-place forms give wrong gradients in compiled networks; the compiler reuses the memory itself.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops.abn.backend import kernels_for
from zoo.ops.abn.reference import Form


class Statistics(NamedTuple):
    """What a norm normalises with: mean and biased variance, shape (C,), and what they were taken over.

    ``num_values`` is their number per channel (that of x, or a tensor for a synchronised layer), and None for
    statistics that do not depend on the input.  ``group`` is the process group that they are those of, or None.
    """

    mean: Tensor
    var: Tensor
    num_values: int | Tensor | None
    group: dist.ProcessGroup | None


class ActivatedBatchNorm(torch.autograd.Function):
    """z = f(g (x - mean) / sqrt(var + eps) + bias + shortcut), g = |weight| + eps, for x of shape (N, C, ...).

    ``shortcut``, of the shape and dtype of x, or None, is kept for backward: the sum of a residual block is not.
    ``mean``, ``var``, ``count`` (its ``num_values``) and ``group`` are those of `Statistics`, inputs without gradient;
    backward sums over the group.  With ``inplace`` x is overwritten and returned.
    The derivative of \\|weight\\| at 0 is +1, as published.  Differentiating twice raises RuntimeError.
    """

    @staticmethod
    def forward(
        x: Tensor,
        shortcut: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: int | Tensor | None,
        settings: tuple[float, str, float],
        inplace: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        form = Form(weight, bias, *settings)
        if not inplace:
            return kernels_for(x).apply(x, mean, var, form, shortcut)
        kernels_for(x).apply_(x, mean, var, form, shortcut)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, shortcut, weight, bias, _, var, count, settings, inplace, group = inputs
        if inplace:
            ctx.mark_dirty(x)
        count_tensor = count if isinstance(count, Tensor) else None
        ctx.save_for_backward(output, shortcut, weight, bias, var, count_tensor)
        ctx.count, ctx.settings, ctx.group = None if count_tensor is not None else count, settings, group

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        z, shortcut, weight, bias, var, count_tensor = ctx.saved_tensors
        form = Form(weight, bias, *ctx.settings)
        count = ctx.count if count_tensor is None else count_tensor
        at_once = getattr(kernels_for(z), "backward", None)
        shared = ctx.group is not None or count_tensor is not None
        if at_once is not None and ctx.needs_input_grad[0] and shortcut is None and not shared:
            dx, dweight, dbias = at_once(z, dz, var, count is not None, form)
            return dx, None, _of_dtype(dweight, weight), _of_dtype(dbias, bias), *[None] * 6
        needs_maps = any(ctx.needs_input_grad[:2])
        return *_gradients(z, dz, shortcut, var, count, ctx.group, form, needs_maps), *[None] * 6


def _gradients(
    z: Tensor,
    dz: Tensor,
    shortcut: Tensor | None,
    var: Tensor,
    count: int | Tensor | None,
    group: dist.ProcessGroup | None,
    form: Form,
    needs_maps: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and of the shortcut, None unless ``needs_maps``, and of weight and bias."""
    kernels = kernels_for(z)
    sum_dy, sum_dy_xhat = kernels.backward_reduce(z, dz, form, shortcut)
    dx = dshortcut = None
    if needs_maps:
        means = None if count is None else means_over_group(sum_dy, sum_dy_xhat, count, group)
        dx, dshortcut = kernels.backward_apply(z, dz, var, means, form, shortcut)
    return dx, dshortcut, *parameter_gradients(sum_dy, sum_dy_xhat, form.weight, form.bias)


def parameter_gradients(
    sum_dy: Tensor, sum_dy_xhat: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return dL/dweight = sign(weight) sum(dy x_hat), the sign of 0 being +1, and dL/dbias = sum(dy)."""
    dweight = None if weight is None else torch.where(weight < 0, -sum_dy_xhat, sum_dy_xhat)
    return _of_dtype(dweight, weight), _of_dtype(sum_dy, bias)


def _of_dtype(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient of a parameter in its dtype, None where there is no parameter."""
    if gradient is None or parameter is None:
        return None
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


# torch binds the arguments to the signature at every call, to fill in defaults; without names there is nothing to bind.
_arguments = inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)
ActivatedBatchNorm.forward.__signature__ = inspect.Signature([_arguments])  # type: ignore[attr-defined]


def means_over_group(
    sum_dy: Tensor, sum_dy_xhat: Tensor, count: int | Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Divide the two sums, taken over the whole group in one all-reduce, by the count."""
    if group is None:
        return sum_dy / count, sum_dy_xhat / count
    sums = torch.stack([sum_dy, sum_dy_xhat])
    dist.all_reduce(sums, group=group)
    mean_dy, mean_dy_xhat = sums / count
    return mean_dy, mean_dy_xhat
