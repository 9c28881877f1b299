"""A norm and the convolution after it, without the map between them being kept for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from zoo.layers.norm import InPlaceABN, InPlaceABNSync
from zoo.ops.abn.functional import check_activation
from zoo.ops.abn.kernels import NormSettings
from zoo.ops.abn.norm_act_conv import join, norm_act_conv
from zoo.ops.abn.statistics import Statistics
from zoo.ops.context import is_fx_proxy, is_recorded
from zoo.ops.convolution import Geometry

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def norm_conv(norm: nn.Module, conv: nn.Module, *inputs: Tensor, keep: str = "input") -> Tensor:
    """Return conv(norm(inputs concatenated along the channels)), computing the norm's output again in backward.

    Kept are the inputs (``keep="input"``) or x_hat (``keep="xhat"``); see `norm_act_conv`. This takes an in-place norm
    and a plain Conv2d. Otherwise, and where there is nothing to keep or nobody to keep it for (no gradients,
    `torch.func`, torch.compile, whose own partitioner decides), or where a hook wants to see the map, the two modules
    are called one after the other: only then does a norm in place overwrite an only input.
    """
    if not _can_recompute(norm, conv, inputs):
        return conv(norm(join(inputs)))
    return _recomputed(norm, conv, inputs, keep)


def _can_recompute(norm: Any, conv: Any, inputs: tuple[Any, ...]) -> bool:
    return (
        is_recorded()
        and type(norm) in (InPlaceABN, InPlaceABNSync)
        and is_plain(conv)
        and not has_hooks(norm)
        and not has_hooks(conv)
        and not any(map(is_fx_proxy, inputs))
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether somebody, for this module or for all, wants to see its inputs, outputs or gradients."""
    return _has_any_global_hook() or any(getattr(module, hooks) for hooks in HOOKS)


def is_plain(conv: Any) -> bool:
    """Return whether a module is a Conv2d of torch's own that pads with zeros by numbers."""
    return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


@torch.no_grad()
def norm_of(norm: Any, x: Tensor) -> tuple[Statistics, NormSettings]:
    """Return the statistics that an in-place norm takes of x, counting the batch, and its settings."""
    check_activation(norm.activation, norm.activation_param, norm.activations)
    statistics = norm.take_statistics(x)
    if statistics.num_values is None:  # backward needs the running mean, and a later batch moves it in place
        statistics = statistics._replace(mean=statistics.mean.clone())
    return statistics, NormSettings(norm.weight, norm.bias, norm.eps, norm.activation, norm.activation_param)


def _recomputed(norm: Any, conv: Any, inputs: tuple[Tensor, ...], keep: str) -> Tensor:
    with torch.no_grad():
        joined = join(inputs)
    statistics, settings = norm_of(norm, joined)
    return norm_act_conv(inputs, joined, statistics, settings, conv.weight, conv.bias, Geometry.of(conv), keep)
