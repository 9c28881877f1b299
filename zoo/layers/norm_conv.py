"""A norm and the convolution after it; backward recomputes the map between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.norm import InPlaceABN, InPlaceABNSync
from zoo.ops.abn.functional import check_activation
from zoo.ops.abn.kernels import NormSettings
from zoo.ops.abn.norm_act_conv import join, norm_act_conv
from zoo.ops.context import is_fx_proxy, is_recorded
from zoo.ops.convolution import Convolution
from zoo.torch_internals import has_hooks


def norm_conv(norm: Any, conv: Any, *inputs: Tensor) -> Tensor:
    """Return conv(norm(inputs concatenated along the channels)), recomputing the norm's output in backward.

    Only the inputs are saved; see `norm_act_conv`. Calls ``conv(norm(...))`` instead
    - unless the norm is in-place and the convolution is a plain Conv2d,
    - if either module has hooks,
    - without gradients, in `torch.func`, and under torch.compile, whose partitioner decides what is saved.
    In these cases an in-place norm overwrites a single input.
    """
    if not _can_recompute(norm, conv, inputs):
        return conv(norm(join(inputs)))
    with torch.no_grad():
        joined = join(inputs)
        check_activation(norm.activation, norm.activation_param, norm.activations)
        statistics = norm.take_statistics(joined)
    settings = NormSettings(norm.weight, norm.bias, norm.eps, norm.activation, norm.activation_param)
    return norm_act_conv(inputs, joined, statistics, settings, conv.weight, conv.bias, Convolution.of(conv, joined))


def _can_recompute(norm: Any, conv: Any, inputs: tuple[Any, ...]) -> bool:
    return (
        is_recorded()
        and type(norm) in (InPlaceABN, InPlaceABNSync)
        and type(conv) is nn.Conv2d
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)  # "same" or "valid"
        and not has_hooks(norm)
        and not has_hooks(conv)
        and not any(map(is_fx_proxy, inputs))
    )
