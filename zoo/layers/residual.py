"""Residual blocks: post-activation (ResNet v1) and pre-activation (ResNeXt, WiderResNet)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import InPlaceABN, NormFactory, activate_, out_of_place
from zoo.ops.context import can_work_in_place, is_fx_proxy

FUSE = ("auto", "always", "never")


class ResidualBlock(nn.Module):
    """Post-activation block: f(branch(x) + shortcut(x)), He et al. 2016; x is left as it is.

    The last norms of branch and shortcut have no activation; f is that of the first norm.

    Args:
    - `in_channels`: those of x.
    - `channels`: those of the convolutions, two for a basic block or three for a bottleneck.
    - `norm`: channels -> norm with activation.
    - `stride`: of the first 3x3 convolution.
    - `dilation`: of the 3x3 convolutions.
    - `fuse`: whether the last norm, if it is in place, adds the shortcut and applies the activation itself, so that its
      own output need not be kept beside the result: "auto" in single and double precision, "always" in half
      precision too, "never". In half precision the norm's gradient is then good as long as its |weight| is at
      least 0.01 rms(sum); a last scale that starts at zero is not.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        norm: NormFactory,
        stride: int = 1,
        dilation: int = 1,
        fuse: str = "auto",
    ) -> None:
        super().__init__()
        if fuse not in FUSE:
            raise ValueError(f"fuse={fuse!r} is not one of {', '.join(FUSE)}")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if len(channels) == 3:  # a bottleneck
            layers["conv1"] = conv2d(in_channels, channels[0], 1)
            layers["bn1"] = norm(channels[0])
            layers["conv2"] = conv2d(channels[0], channels[1], 3, stride=stride, dilation=dilation)
            layers["bn2"] = norm(channels[1])
            layers["conv3"] = conv2d(channels[1], channels[2], 1)
            layers["bn3"] = _without_activation(norm(channels[2]))
        else:
            layers["conv1"] = conv2d(in_channels, channels[0], 3, stride=stride, dilation=dilation)
            layers["bn1"] = norm(channels[0])
            layers["conv2"] = conv2d(channels[0], channels[1], 3, dilation=dilation)
            layers["bn2"] = _without_activation(norm(channels[1]))
        self.convs = _Branch(layers)
        self.fuse = fuse
        self.has_projection = stride != 1 or in_channels != channels[-1]
        if self.has_projection:
            self.proj_conv = conv2d(in_channels, channels[-1], kernel_size=1, stride=stride)
            self.proj_bn = _without_activation(norm(channels[-1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in a new tensor."""
        shortcut = self.proj_bn(self.proj_conv(x)) if self.has_projection else x
        first_norm: Any = self.convs.bn1
        return self.convs(x, shortcut, (first_norm.activation, first_norm.activation_param), self.fuse)


class _Branch(nn.Sequential):
    """The layers of a post-activation branch, the last of them a norm without activation."""

    def forward(  # type: ignore[override]
        self, x: Tensor, shortcut: Tensor, activation: tuple[str, float], fuse: str
    ) -> Tensor:
        """Return f(layers(x) + shortcut) in a new tensor."""
        *layers, norm = self
        for layer in layers:
            x = layer(x)
        if fuse != "never" and _can_fuse(norm, x, shortcut, activation, in_half=fuse == "always"):
            return norm(x, shortcut=shortcut, activation=activation)  # by name: a hook sees x as the only input
        return activate_(norm(x) + shortcut, *activation)


def _can_fuse(norm: Any, x: Tensor, shortcut: Tensor, activation: tuple[str, float], in_half: bool) -> bool:
    """Return whether the norm can add the shortcut and activate the sum, and recover the sum precisely enough."""
    return (
        type(norm).forward is InPlaceABN.forward  # a subclass with another forward may know no shortcut
        and norm.activation == "identity"
        and activation[0] in norm.activations
        and not is_fx_proxy(x)
        and (x.shape, x.dtype) == (shortcut.shape, shortcut.dtype)
        and (in_half or x.dtype in (torch.float32, torch.float64))
    )


class IdentityResidualBlock(nn.Module):
    """Pre-activation block: x + branch(norm(x)), nothing after the sum, He et al. 2016 (identity mappings).

    A projection reads the output of the first norm, which never overwrites x.

    Args:
    - `in_channels`: those of x.
    - `channels`: those of the convolutions, two for a basic block or three for a bottleneck.
    - `norm`: channels -> norm with activation.
    - `stride`: of the first convolution, and of the projection.
    - `groups`: of a bottleneck's 3x3 convolution.
    - `dilation`: of the 3x3 convolutions.
    - `dropout`: the probability with which whole maps are dropped before the last convolution.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        norm: NormFactory,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        bottleneck = len(channels) == 3
        if groups > 1 and not bottleneck:
            raise ValueError(f"groups={groups} needs a block of three channels, got {tuple(channels)}")
        self.bn1 = out_of_place(norm(in_channels))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if bottleneck:
            layers["conv1"] = conv2d(in_channels, channels[0], 1, stride=stride)
            layers["bn2"] = norm(channels[0])
            layers["conv2"] = conv2d(channels[0], channels[1], 3, groups=groups, dilation=dilation)
            layers["bn3"] = norm(channels[1])
            if dropout > 0:
                layers["dropout"] = nn.Dropout2d(dropout)
            layers["conv3"] = conv2d(channels[1], channels[2], 1)
        else:
            layers["conv1"] = conv2d(in_channels, channels[0], 3, stride=stride, dilation=dilation)
            layers["bn2"] = norm(channels[0])
            if dropout > 0:
                layers["dropout"] = nn.Dropout2d(dropout)
            layers["conv2"] = conv2d(channels[0], channels[1], 3, dilation=dilation)
        self.convs = nn.Sequential(layers)
        self.has_projection = stride != 1 or in_channels != channels[-1]
        if self.has_projection:
            self.proj_conv = conv2d(in_channels, channels[-1], kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in a new tensor."""
        activated = self.bn1(x)
        shortcut = self.proj_conv(activated) if self.has_projection else x
        y = self.convs(activated)  # a convolution's output, which nobody else keeps
        return y.add_(shortcut) if can_work_in_place() else y + shortcut


def _without_activation(norm: Any) -> Any:
    if not hasattr(norm, "activation"):
        raise ValueError(
            f"{type(norm).__name__} has no attribute `activation` to set to identity: post-activation ResNets need "
            "norms that have one (as ABN, InPlaceABN and InPlaceABNSync)"
        )
    norm.activation = "identity"
    return norm
