"""The dense block of DenseNet, and a fused norm and convolution that recomputes the norm's output in backward."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.checkpointing import checkpoint
from zoo.layers.conv import conv2d
from zoo.layers.norm import InPlaceABN, InPlaceABNSync, NormFactory, out_of_place
from zoo.ops.abn.functional import check_activation
from zoo.ops.abn.norm_act_conv import join, norm_act_conv
from zoo.ops.abn.reference import NormSettings
from zoo.ops.context import is_eager, is_fx_proxy
from zoo.ops.convolution import Convolution, is_plain_convolution
from zoo.torch_internals.data import is_plain_layer


class DenseModule(nn.Module):
    """Dense block (Huang et al. 2017); each layer is norm, 1x1 conv to 4 growth, norm, 3x3 conv to growth channels.

    Each layer reads the concatenation of the input and all earlier outputs. The output, ``out_channels`` wide, is the
    concatenation of the input and all layers' outputs. The state dict holds all ``convs1`` before all ``convs3``, as
    published.

    Args:
    - `in_channels`: channels of the input.
    - `growth`: channels that each layer adds.
    - `layers`: number of layers.
    - `norm`: function channels -> norm with its activation.
    - `dilation`: dilation of the 3x3 convolutions.
    - `memory`: what is saved for backward.
      "auto": the output of each layer and of its second norm, linear in the number of layers; the concatenation and
      the first norm are recomputed (`norm_conv`). Needs in-place norms; with others the same as "plain".
      "plain": also the outputs of the first norms, quadratic in the number of layers.
      "checkpoint": the layers' outputs only; backward recomputes each layer.
    """

    def __init__(
        self,
        in_channels: int,
        growth: int,
        layers: int,
        norm: NormFactory,
        dilation: int = 1,
        memory: str = "auto",
    ) -> None:
        super().__init__()
        self.memory = memory
        self.convs1 = nn.ModuleList()
        self.convs3 = nn.ModuleList()
        width = 4 * growth
        for index in range(layers):
            channels = in_channels + index * growth
            conv1, conv3 = conv2d(channels, width, 1), conv2d(width, growth, 3, dilation=dilation)
            self.convs1.append(NormConv(norm(channels), conv1, recompute=memory == "auto"))
            self.convs3.append(NormConv(norm(width), conv3))
        out_of_place(self.convs1[0].bn)  # the first layer reads the block's input itself, not a concatenation
        self.out_channels = in_channels + layers * growth

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, H, W) in a new tensor."""
        return join(self.maps(x))

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the parts of the output: x, and (N, growth, H, W) for each layer."""
        maps = [x]
        for conv1, conv3 in zip(self.convs1, self.convs3, strict=True):
            if self.memory == "checkpoint" and not is_fx_proxy(x):
                maps.append(checkpoint(_DenseLayer(conv1, conv3), *maps))
            else:
                maps.append(conv3(conv1(*maps)))
        return maps


class _DenseLayer(nn.Module):
    """One layer as a module that `checkpoint` can recompute; created for a single call."""

    def __init__(self, conv1: nn.Module, conv3: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv3 = conv1, conv3

    def forward(self, *maps: Tensor) -> Tensor:
        return self.conv3(self.conv1(*maps))


class NormConv(nn.Sequential):
    """Norm ``bn`` and convolution ``conv`` of the concatenation of all inputs.

    With ``recompute`` and an in-place norm, backward recomputes the concatenation and the norm's output.
    """

    bn: nn.Module
    conv: nn.Module

    def __init__(self, bn: nn.Module, conv: nn.Module, recompute: bool = False) -> None:
        super().__init__(OrderedDict(bn=bn, conv=conv))
        self.recompute = recompute

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return (N, channels of ``conv``, H, W) in a new tensor."""
        return norm_conv(self.bn, self.conv, *inputs) if self.recompute else self.conv(self.bn(join(inputs)))


def norm_conv(norm: Any, conv: Any, *inputs: Tensor) -> Tensor:
    """Return conv(norm(inputs concatenated along the channels)), recomputing the norm's output in backward.

    Only the inputs are saved; see `norm_act_conv`. Calls ``conv(norm(...))`` instead
    - unless the norm is in-place and the convolution a Conv2d, both unchanged (`is_plain_layer`): a subclass, a hook, a
      replaced function and offloaded parameters need the call,
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
        torch.is_grad_enabled()
        and is_eager()  # only then does autograd save exactly what the operations ask for
        and not any(map(is_fx_proxy, inputs))
        and is_plain_layer(norm, inputs[0], InPlaceABN, InPlaceABNSync)
        and is_plain_convolution(conv, inputs[0])
    )
