"""Residual functions, shortcuts, stem and blocks of RevNets, i-RevNets and their ResNet baselines.

Source: Gomez et al. 2017, section 3, and its code.
"""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.conv import conv2d, drop_path, max_pool
from zoo.layers.norm import NormFactory, out_of_place
from zoo.ops.inverse import halves
from zoo.torch_internals.data import NormBase

BN_EPS, BN_MOMENTUM = 1e-3, 0.01  # as in the authors' code (a decay of 0.99)


def with_paper_statistics(norm: NormFactory) -> NormFactory:
    """Return the norm factory with eps 1e-3 and momentum 0.01 for batch norms; other norms are unchanged."""

    def build(channels: int) -> nn.Module:
        layer = norm(channels)
        for module in layer.modules():
            if isinstance(module, NormBase):
                module.eps, module.momentum = BN_EPS, BN_MOMENTUM
        return layer

    return build


def build_preact_stem(channels: int, norm: NormFactory, imagenet: bool, memory: str) -> nn.Sequential:
    """Return the stem: 3x3 conv and norm; for ImageNet 7x7/2 conv, norm and 3x3/2 max pool (torch's if "plain")."""
    size, stride = (7, 2) if imagenet else (3, 1)
    stem: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv2d(3, channels, size, stride=stride), bn1=norm(channels))
    if imagenet:
        stem["pool1"] = max_pool(memory)
    return nn.Sequential(stem)


def build_preact_branch(
    in_channels: int,
    out_channels: int,
    norm: NormFactory,
    bottleneck: bool,
    stride: int = 1,
    leading_norm: bool = True,
    outer_size: int = 1,
    dropout: float | None = None,
) -> nn.Sequential:
    """Return a residual function. It does not modify its input; its norms include the activation.

    A ``bottleneck`` has ``out_channels`` / 4 inner channels, and its first and last convolution have kernels of
    ``outer_size``; in i-RevNets they are 3x3, with ``dropout`` before the last norm (code of Jacobsen et al. 2018).
    The first function of a network has no ``leading_norm``: the stem ends with one, and images need none.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if leading_norm:
        layers["bn1"] = out_of_place(norm(in_channels))
    if bottleneck:
        inner = out_channels // 4
        layers["conv1"] = conv2d(in_channels, inner, outer_size, stride=stride)
        layers["bn2"] = norm(inner)
        layers["conv2"] = conv2d(inner, inner, 3)
        if dropout is not None:
            layers["dropout"] = nn.Dropout(dropout)
        layers["bn3"] = norm(inner)
        layers["conv3"] = conv2d(inner, out_channels, outer_size)
    else:
        layers["conv1"] = conv2d(in_channels, out_channels, 3, stride=stride)
        layers["bn2"] = norm(out_channels)
        layers["conv2"] = conv2d(out_channels, out_channels, 3)
    return nn.Sequential(layers)


def build_preact_shortcut(in_channels: int, out_channels: int, bottleneck: bool, stride: int) -> nn.Module:
    """Return the shortcut of a residual function: the identity if input and output have the same shape.

    Otherwise it is a strided 1x1 convolution for bottlenecks, and a `PooledShortcut` for basic functions.
    """
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    if bottleneck:
        return conv2d(in_channels, out_channels, 1, stride=stride)
    return PooledShortcut(in_channels, out_channels, stride)


class PooledShortcut(nn.Module):
    """Average pooling by the stride, then zero-padding of the channels, half before and half after."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.added, self.stride = out_channels - in_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, out_channels, ceil(H / stride), ceil(W / stride)), the size of the residual function's output."""
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return add_zero_channels(x, self.added)


def add_zero_channels(x: Tensor, number: int) -> Tensor:
    """Return x (N, C, H, W) with ``number`` channels of zeros added, half before and half after the others."""
    return F.pad(x, (0, 0, 0, 0, number // 2, number - number // 2))


class PreactBlock(nn.Module):
    """branch(x) + shortcut(x), with no norm or activation outside the branch; does not modify x.

    The attribute ``drop_path`` is the probability that training drops the branch for an image; 0 by default.
    """

    drop_path = 0.0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        norm: NormFactory,
        bottleneck: bool,
        stride: int = 1,
        leading_norm: bool = True,
    ) -> None:
        super().__init__()
        self.branch = build_preact_branch(in_channels, out_channels, norm, bottleneck, stride, leading_norm)
        self.shortcut = build_preact_shortcut(in_channels, out_channels, bottleneck, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in a new tensor."""
        y = self.branch(x)
        if self.drop_path and self.training:
            y = drop_path(y, self.drop_path)
        return y + self.shortcut(x)


class TransitionBlock(nn.Module):
    """RevNet unit that changes resolution or width: y1 = shortcut1(x1) + f(x2), y2 = shortcut2(x2) + g(y1).

    x1, x2 and y1, y2 are the halves of ``in_channels`` and ``out_channels``; f and the shortcuts are strided. Has no
    inverse. Does not modify x.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        norm: NormFactory,
        bottleneck: bool,
        stride: int = 1,
        leading_norm: bool = True,
    ) -> None:
        super().__init__()
        half_in, half_out = in_channels // 2, out_channels // 2
        self.f = build_preact_branch(half_in, half_out, norm, bottleneck, stride, leading_norm)
        self.g = build_preact_branch(half_out, half_out, norm, bottleneck)
        self.shortcut1 = build_preact_shortcut(half_in, half_out, bottleneck, stride)
        self.shortcut2 = build_preact_shortcut(half_in, half_out, bottleneck, stride)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y1 and y2, each (N, out_channels / 2, H / stride, W / stride) in a new tensor."""
        x1, x2 = halves(x)
        y1 = self.shortcut1(x1) + self.f(x2)
        return y1, self.shortcut2(x2) + self.g(y1)
