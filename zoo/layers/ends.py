"""Both ends of the networks: the stem, with its maximum pooling, and the classifier."""

from __future__ import annotations

from collections import OrderedDict

import torch.fx
from torch import Tensor, nn

from zoo.layers.conv import conv2d, uninitialized
from zoo.layers.norm import NormFactory
from zoo.ops.pooling import max_pool2d

torch.fx.wrap("max_pool2d")  # one call in a traced graph, where it is unknown whether a tensor requires grad


class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` that keeps one byte per output for backward, not its input and 64-bit indices."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the maximum of each window; with ``return_indices`` torch's pair, and torch's memory."""
        if self.return_indices:
            return super().forward(x)
        return max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


def max_pool(memory: str = "auto") -> nn.MaxPool2d:
    """Return the 3x3 maximum pooling of stride 2 that all networks use; ``memory="plain"``: torch's own."""
    return (nn.MaxPool2d if memory == "plain" else MaxPool2d)(3, stride=2, padding=1)


def build_stem(channels: int, norm: NormFactory, input_3x3: bool, memory: str = "auto") -> nn.Sequential:
    """Return the stem of networks whose first norm belongs to their first block (ResNeXt, DenseNet).

    It is a 7x7 convolution of stride 2 and the pool, or with ``input_3x3`` three 3x3 convolutions, the first of stride
    2, with two norms between them, and the pool. ``memory="plain"`` takes torch's own pool, which keeps more for
    backward.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if input_3x3:
        for index, in_channels in enumerate((3, channels, channels), start=1):
            layers[f"conv{index}"] = conv2d(in_channels, channels, 3, stride=2 if index == 1 else 1)
            if index < 3:
                layers[f"bn{index}"] = norm(channels)
    else:
        layers["conv1"] = conv2d(3, channels, 7, stride=2)
    layers["pool"] = max_pool(memory)
    return nn.Sequential(layers)


class GlobalAvgPool2d(nn.Module):
    """Mean over the map: (N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel's map."""
        return x.flatten(2).mean(-1)


def build_classifier(channels: int, classes: int, drop_rate: float = 0.0) -> nn.Sequential:
    """Return ``avg_pool``, with a ``drop_rate`` above 0 ``drop``, and the uninitialized linear layer ``fc``."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(avg_pool=GlobalAvgPool2d())
    if drop_rate > 0:
        layers["drop"] = nn.Dropout(drop_rate)
    layers["fc"] = uninitialized(nn.Linear, channels, classes)
    return nn.Sequential(layers)
