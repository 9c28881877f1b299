"""The stem of the networks whose first norm belongs to the first block (ResNeXt, DenseNet)."""

from __future__ import annotations

from collections import OrderedDict

import torch.fx
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import NormFactory
from zoo.ops.max_pool import max_pool2d

torch.fx.wrap("max_pool2d")  # one call in a traced graph: whether a tensor requires grad cannot be asked there


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
    """Return 7x7/2 and pool without any norm, or with ``input_3x3`` three 3x3 (the first /2), two norms and pool.

    ``memory="plain"`` takes torch's own pool, which keeps more for backward.
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
