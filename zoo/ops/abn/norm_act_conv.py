"""Norm, activation and convolution as one operation that computes the map between them again in backward.

The paper's alternatives to the in-place norm (Rota Bulo et al., CVPR 2018, section 3.2): keep the input x (Figure 2 b),
or x_hat (Figure 2 c), and compute z = f(g x_hat + b) again. They take an operation over all three, because an ordinary
convolution keeps z. Where several inputs are concatenated first, and are kept anyway, as in a DenseNet, the former
costs no memory at all; each layer of an ordinary DenseNet keeps a copy of everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.ops.abn.autograd import parameter_gradients
from zoo.ops.abn.backend import kernels_for
from zoo.ops.abn.kernels import NormSettings
from zoo.ops.abn.statistics import Statistics, means_over_group
from zoo.ops.convolution import Convolution, Geometry, convolution_dtype

KEEP = ("input", "xhat")


def join(inputs: Sequence[Tensor]) -> Tensor:
    """Return the inputs concatenated along the channels; a single one as it is."""
    return torch.cat(list(inputs), dim=1) if len(inputs) > 1 else inputs[0]


def norm_act_conv(
    inputs: Sequence[Tensor],
    joined: Tensor,
    statistics: Statistics,
    form: NormSettings,
    kernel: Tensor,
    offset: Tensor | None,
    geometry: Geometry,
    keep: str = "input",
) -> Tensor:
    """Return conv(f((|weight| + eps) x_hat + bias)) of the concatenated ``inputs``, which are left as they are.

    ``joined`` is `join` of the inputs without gradient, whose ``statistics`` have been taken; a concatenation is
    overwritten. ``kernel`` and ``offset`` are the convolution's weight and bias. Backward keeps the inputs or, with
    ``keep="xhat"``, x_hat instead, beside the parameters and per-channel vectors; it repeats the concatenation, the
    norm and the activation, neither the statistics nor the convolution, and sums over the group in one all-reduce.
    The norm's gradient is then taken from z, as precise as that of `inplace_abn`.
    Under autocast the convolution has autocast's dtype, as an ordinary one. Gradients can be taken once, not twice.
    Raises RuntimeError in backward if an input that is kept has been modified.
    """
    if keep not in KEEP:
        raise ValueError(f"keep={keep!r} is not one of {', '.join(KEEP)}")
    scratch, x_hat = (joined if len(inputs) > 1 else None), None
    if keep == "xhat":
        scratch, x_hat = None, _normalised(joined, statistics, form.eps)
    mean, var, count, group = statistics
    settings = (form[2:], Convolution(geometry, convolution_dtype(joined)), group)
    tensors = (form.weight, form.bias, kernel, offset)
    return _NormActConv.apply(settings, count, scratch, x_hat, mean, var, *tensors, *inputs)


@torch.no_grad()
def _normalised(x: Tensor, statistics: Statistics, eps: float) -> Tensor:
    return kernels_for(x).apply(x, statistics.mean, statistics.var, NormSettings(None, None, eps, "identity", 0.0))


class _NormActConv(torch.autograd.Function):
    @staticmethod
    def forward(
        settings: tuple[Any, ...],
        count: int | Tensor | None,
        scratch: Tensor | None,
        x_hat: Tensor | None,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kernel: Tensor,
        offset: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        form_settings, convolution, _ = settings
        form = NormSettings(weight, bias, *form_settings)
        if scratch is None:
            z = _activated(inputs, x_hat, mean, var, form)
        else:
            z = scratch
            kernels_for(z).apply_(z, mean, var, form)
        return convolution(z, kernel, offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        settings, count, _, x_hat, *tensors = inputs
        vectors, maps = tensors[:6], tensors[6:]
        ctx.settings, ctx.count = settings, count if isinstance(count, int) else None
        ctx.sizes = [x.shape[1] for x in maps]
        count = count if isinstance(count, Tensor) else None
        ctx.save_for_backward(count, x_hat, *vectors, *(maps if x_hat is None else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        count, x_hat, mean, var, weight, bias, kernel, offset, *inputs = ctx.saved_tensors
        form_settings, convolution, group = ctx.settings
        needs_weight, needs_bias, *needs_conv = ctx.needs_input_grad[6:10]
        needs_dx = any(ctx.needs_input_grad[10:])
        form = NormSettings(weight, bias, *form_settings)
        z = _activated(inputs, x_hat, mean, var, form)
        needs = [needs_weight or needs_bias or needs_dx, *needs_conv]
        dz, dkernel, doffset = convolution.backward(dout, z, kernel, offset, needs)
        dweight = dbias = None
        dinputs: Sequence[Tensor | None] = [None] * len(ctx.sizes)
        if dz is not None:
            sum_dy, sum_dy_xhat = kernels_for(z).backward_reduce(z, dz, form)
            dweight, dbias = parameter_gradients(sum_dy, sum_dy_xhat, weight, bias)
            if needs_dx:
                count = ctx.count if count is None else count
                means = None if count is None else means_over_group(sum_dy, sum_dy_xhat, count, group)
                dinputs = kernels_for(z).backward_apply(z, dz, var, means, form)[0].split(ctx.sizes, dim=1)
        return *[None] * 6, dweight, dbias, dkernel, doffset, *dinputs


def _activated(inputs: Sequence[Tensor], x_hat: Tensor | None, mean: Tensor, var: Tensor, form: NormSettings) -> Tensor:
    """Return z in a new tensor, from x_hat or, if that is None, from the inputs."""
    if x_hat is not None:  # mean 0 and variance 1 - eps leave scale, shift and activation
        return kernels_for(x_hat).apply(x_hat, torch.zeros_like(mean), torch.full_like(var, 1 - form.eps), form)
    if len(inputs) == 1:
        return kernels_for(inputs[0]).apply(inputs[0], mean, var, form)
    z = join(inputs)
    kernels_for(z).apply_(z, mean, var, form)
    return z
