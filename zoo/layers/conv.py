"""Layers that the networks share: convolutions without bias, max pooling, stem, classifier, and stochastic depth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx
from torch import Tensor, nn

from zoo.layers.norm import NormFactory
from zoo.ops.pooling import max_pool2d

torch.fx.wrap("max_pool2d")  # a leaf call in torch.fx graphs: proxies do not tell whether they require grad

Layer = TypeVar("Layer", bound=nn.Module)


def uninitialized(kind: Callable[..., Layer], *arguments: Any, **options: Any) -> Layer:
    """Return a convolution or linear layer on the default device with uninitialized weights.

    Unlike `torch.nn.utils.skip_init`, it does not import torch's code for the meta device; the import takes a third of
    a second.
    """
    layer = kind(*arguments, **options, device="meta")
    device = torch.get_default_device()
    if device.type != "meta":
        for name, weight in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=device)))
    return layer


def conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """Return an uninitialized convolution without bias; its padding preserves height and width at stride 1."""
    return uninitialized(
        nn.Conv2d,
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=dilation * (kernel_size // 2),
        groups=groups,
        dilation=dilation,
        bias=False,
    )


class MaxPool2d(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` that saves one byte per output for backward instead of its input and 64-bit indices."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the maximum of each window. With ``return_indices``, torch's own pooling runs and uses its memory."""
        if self.return_indices:
            return super().forward(x)
        return max_pool2d(x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


def max_pool(memory: str = "auto") -> nn.MaxPool2d:
    """Return the networks' 3x3 max pooling with stride 2; torch's own with ``memory="plain"``."""
    return (nn.MaxPool2d if memory == "plain" else MaxPool2d)(3, stride=2, padding=1)


def build_stem(channels: int, norm: NormFactory, input_3x3: bool, memory: str = "auto") -> nn.Sequential:
    """Return the stem of pre-activation networks (ResNeXt, DenseNet), whose first block starts with a norm.

    A 7x7 convolution with stride 2, or with ``input_3x3`` three 3x3 convolutions, the first with stride 2, and norms
    between them. Max pooling follows: torch's own with ``memory="plain"``.
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


def drop_path(branch: Tensor, probability: float) -> Tensor:
    """Multiply each image of ``branch`` (N, C, H, W) by 0 with probability p, otherwise by 1 / (1 - p).

    Returns a new tensor. Source: Huang et al., Deep Networks with Stochastic Depth, 2016, scaled in training as in timm
    and torchvision.
    """
    # Bit-identical to torchvision.ops.stochastic_depth, but importing torchvision takes as long as importing torch.
    keep = 1 - probability
    return branch * branch.new_empty(branch.shape[0], 1, 1, 1).bernoulli_(keep).div_(keep)


class GlobalAvgPool2d(nn.Module):
    """Global average pooling: (N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel."""
        return x.flatten(2).mean(-1)


def build_classifier(channels: int, num_classes: int, drop_rate: float = 0.0, linear_name: str = "fc") -> nn.Sequential:
    """Return ``avg_pool``, ``drop`` if ``drop_rate`` is above 0, and an uninitialized linear layer, ``fc``."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(avg_pool=GlobalAvgPool2d())
    if drop_rate > 0:
        layers["drop"] = nn.Dropout(drop_rate)
    layers[linear_name] = uninitialized(nn.Linear, channels, num_classes)
    return nn.Sequential(layers)
