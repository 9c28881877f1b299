"""The dense block of DenseNet."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import NormFactory, out_of_place


class DenseModule(nn.Module):
    """Layers that each read all earlier outputs: norm, 1x1 to 4 growth, norm, 3x3 to growth (Huang et al. 2017).

    The output is the concatenation of the input and all layers' outputs, ``out_channels`` wide.  The state dict holds
    all ``convs1`` before all ``convs3``, as published.
    """

    def __init__(self, in_channels: int, growth: int, layers: int, norm: NormFactory, dilation: int = 1) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList()
        self.convs3 = nn.ModuleList()
        for index in range(layers):
            channels = in_channels + index * growth
            self.convs1.append(_norm_conv(channels, 4 * growth, norm, kernel_size=1))
            self.convs3.append(_norm_conv(4 * growth, growth, norm, kernel_size=3, dilation=dilation))
        out_of_place(self.convs1[0].bn)  # the first layer reads the module's input itself, not a concatenation
        self.out_channels = in_channels + layers * growth

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, H, W) in a new tensor."""
        outputs = [x]
        for conv1, conv3 in zip(self.convs1, self.convs3, strict=True):
            joined = torch.cat(outputs, dim=1) if len(outputs) > 1 else x
            outputs.append(conv3(conv1(joined)))
        return torch.cat(outputs, dim=1)


def _norm_conv(
    in_channels: int, out_channels: int, norm: NormFactory, kernel_size: int, dilation: int = 1
) -> nn.Sequential:
    conv = conv2d(in_channels, out_channels, kernel_size, dilation=dilation)
    return nn.Sequential(OrderedDict(bn=norm(in_channels), conv=conv))
