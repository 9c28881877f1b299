"""A norm and the convolution after it, without keeping the map between them for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.norm import InPlaceABN, InPlaceABNSync
from zoo.ops.abn.functional import check_activation
from zoo.ops.abn.kernels import NormSettings
from zoo.ops.abn.norm_act_conv import join, norm_act_conv
from zoo.ops.abn.statistics import Statistics
from zoo.ops.context import is_fx_proxy, is_recorded
from zoo.ops.convolution import Convolution
from zoo.torch_internals import has_hooks


def norm_conv(norm: nn.Module, conv: Any, *inputs: Tensor) -> Tensor:
    """Return conv(norm(inputs concatenated along the channels)), computing the norm's output again in backward.

    Only the inputs are kept; see `norm_act_conv`. This needs an in-place norm and a plain Conv2d. The two modules are
    called one after the other if they are of other kinds, if a hook observes them, and if autograd does not keep
    anything here (without gradients, in `torch.func`, and under torch.compile, whose partitioner decides what is kept).
    Only in these cases does an in-place norm overwrite its input, if it is the only one.
    """
    if not _can_recompute(norm, conv, inputs):
        return conv(norm(join(inputs)))
    with torch.no_grad():
        joined = join(inputs)
    statistics, settings = statistics_and_settings(norm, joined)
    return norm_act_conv(inputs, joined, statistics, settings, conv.weight, conv.bias, Convolution.of(conv, joined))


def _can_recompute(norm: Any, conv: Any, inputs: tuple[Any, ...]) -> bool:
    return (
        is_recorded()
        and type(norm) in (InPlaceABN, InPlaceABNSync)
        and is_plain(conv)
        and not has_hooks(norm)
        and not has_hooks(conv)
        and not any(map(is_fx_proxy, inputs))
    )


def is_plain(conv: Any) -> bool:
    """Return whether a module is torch's own Conv2d, padded with zeros and by numbers, not by a word like "same"."""
    return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


@torch.no_grad()
def statistics_and_settings(norm: Any, x: Tensor) -> tuple[Statistics, NormSettings]:
    """Return the statistics that an in-place norm takes of x, counting the batch, and its settings."""
    check_activation(norm.activation, norm.activation_param, norm.activations)
    statistics = norm.take_statistics(x)
    if statistics.num_values is None:  # backward needs the running mean, and a later batch moves it in place
        statistics = statistics._replace(mean=statistics.mean.clone())
    return statistics, NormSettings(norm.weight, norm.bias, norm.eps, norm.activation, norm.activation_param)
