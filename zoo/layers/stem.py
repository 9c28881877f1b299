"""The stem of the networks whose first norm belongs to the first block (ResNeXt, DenseNet)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import NormFactory


def max_pool() -> nn.MaxPool2d:
    """Return the 3x3 maximum pooling of stride 2 that all networks use."""
    return nn.MaxPool2d(3, stride=2, padding=1)


def build_stem(channels: int, norm: NormFactory, input_3x3: bool) -> nn.Sequential:
    """Return 7x7/2 and pool without any norm, or with ``input_3x3`` three 3x3 (the first /2), two norms and pool."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if input_3x3:
        for index, in_channels in enumerate((3, channels, channels), start=1):
            layers[f"conv{index}"] = conv2d(in_channels, channels, 3, stride=2 if index == 1 else 1)
            if index < 3:
                layers[f"bn{index}"] = norm(channels)
    else:
        layers["conv1"] = conv2d(3, channels, 7, stride=2)
    layers["pool"] = max_pool()
    return nn.Sequential(layers)
