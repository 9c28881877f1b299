"""Fused norm, activation and convolution. Backward recomputes the input of the convolution.

This is the paper's alternative to the in-place norm: it saves the norm's input (Rota Bulo et al., CVPR 2018,
Figure 2 b). The three must be one operation, because an ordinary convolution saves its input z = f(g x_hat + b). In a
DenseNet it needs no additional memory, since the inputs of the concatenation are saved anyway; each layer of an
ordinary DenseNet saves a copy of all previous outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.ops.abn.autograd import reduce_gradients
from zoo.ops.abn.kernels import kernels_for
from zoo.ops.abn.reference import NormSettings
from zoo.ops.abn.statistics import Statistics
from zoo.ops.convolution import Convolution
from zoo.ops.second_derivatives import first_derivatives_only


def join(inputs: Sequence[Tensor]) -> Tensor:
    """Concatenate the inputs along the channels. A single input is returned unchanged."""
    return torch.cat(list(inputs), dim=1) if len(inputs) > 1 else inputs[0]


def norm_act_conv(
    inputs: Sequence[Tensor],
    joined: Tensor,
    statistics: Statistics,
    settings: NormSettings,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    convolution: Convolution,
) -> Tensor:
    """Return conv(f((|weight| + eps) x_hat + bias)) of the concatenated ``inputs``, which are not modified.

    ``joined`` is the result of `join` without gradient, and ``statistics`` are its statistics. It is overwritten if
    there are several inputs. Saves the inputs, the parameters and per-channel vectors. Backward recomputes the
    concatenation, the norm and the activation, but not the statistics or the convolution, and sums over the group in
    one all-reduce. The norm's gradient is computed from z, with the precision of `inplace_abn`. Under autocast the
    convolution uses autocast's dtype. There are no second derivatives. Raises RuntimeError in backward if an input has
    been modified.
    """
    return _NormActConv.apply(convolution, joined, *statistics, *settings, conv_weight, conv_bias, *inputs)


class _NormActConv(torch.autograd.Function):
    @staticmethod
    def forward(
        convolution: Convolution,
        joined: Tensor,
        mean: Tensor,
        var: Tensor,
        num_values: int | Tensor | None,
        group: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        activation: str,
        activation_param: float,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        settings = NormSettings(weight, bias, eps, activation, activation_param)
        return convolution(_activated(joined, len(inputs) > 1, mean, var, settings), conv_weight, conv_bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.convolution, _, mean, var, num_values, ctx.group, weight, bias, *scalars = inputs[:11]
        ctx.scalars, ctx.sizes = scalars, [x.shape[1] for x in inputs[13:]]
        num_tensor = num_values if isinstance(num_values, Tensor) else None
        ctx.num_values = num_values if num_tensor is None else None
        ctx.save_for_backward(num_tensor, mean, var, weight, bias, *inputs[11:])

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        num_tensor, mean, var, weight, bias, conv_weight, conv_bias, *inputs = ctx.saved_tensors
        num_values = ctx.num_values if num_tensor is None else num_tensor
        settings = NormSettings(weight, bias, *ctx.scalars)
        needs_dx = any(ctx.needs_input_grad[13:])
        needed = [needs_dx or any(ctx.needs_input_grad[6:8]), *ctx.needs_input_grad[11:13]]
        z = _activated(join(inputs), len(inputs) > 1, mean, var, settings)
        dz, dconv_weight, dconv_bias = ctx.convolution.backward(dout, z, conv_weight, conv_bias, needed)
        dweight = dbias = None
        dinputs: Sequence[Tensor | None] = [None] * len(inputs)
        if dz is not None:
            means, dweight, dbias = reduce_gradients(z, dz, num_values if needs_dx else None, ctx.group, settings)
            if needs_dx:
                dinputs = kernels_for(z).backward_apply(z, dz, var, means, settings)[0].split(ctx.sizes, dim=1)
        return *[None] * 6, dweight, dbias, *[None] * 3, dconv_weight, dconv_bias, *dinputs


def _activated(joined: Tensor, overwrite: bool, mean: Tensor, var: Tensor, settings: NormSettings) -> Tensor:
    """Return z, in the memory of ``joined`` with ``overwrite``, otherwise in a new tensor."""
    if not overwrite:
        return kernels_for(joined).apply(joined, mean, var, settings)
    kernels_for(joined).apply_(joined, mean, var, settings)
    return joined
