"""Residual blocks: post-activation (ResNet v1) and pre-activation (ResNeXt, WiderResNet), and their stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.checkpointing import CheckpointedSequential
from zoo.layers.conv import conv2d
from zoo.layers.norm import InPlaceABN, NormFactory, activate_, out_of_place
from zoo.ops.context import can_work_in_place, is_fx_proxy

FUSE_MODES = ("auto", "always", "never")
# The option ``memory`` -> the argument ``fuse`` of `ResidualBlock`.
FUSE_BY_MEMORY = {"plain": "never", "auto": "auto", "fused": "always", "checkpoint": "auto"}


def drop_path(branch: Tensor, probability: float) -> Tensor:
    """Return a new tensor: the ``branch`` (N, C, H, W) of each image times 0 with this probability, or 1 / (1 - p).

    Source: Huang et al., Deep Networks with Stochastic Depth, 2016, scaled in training as in timm and torchvision.
    """
    keep = 1 - probability
    return branch * branch.new_empty(branch.shape[0], 1, 1, 1).bernoulli_(keep).div_(keep)


class ResidualBlock(nn.Module):
    """Post-activation block, f(branch(x) + shortcut(x)), He et al. 2016; does not modify x.

    The last norms of branch and shortcut have no activation; f is the activation of the first norm.

    Args:
    - `in_channels`: channels of x.
    - `channels`: output channels of the convolutions: two for a basic block, three for a bottleneck.
    - `norm`: channels -> norm with activation.
    - `stride`: stride of the first 3x3 convolution.
    - `dilation`: dilation of the 3x3 convolutions.
    - `fuse`: when the last norm, if in-place, adds the shortcut and applies the activation itself, so that its own
      output is not saved in addition to the result. "auto": in single and double precision; "always": in half
      precision too; "never". In half precision the norm's gradient is then accurate only while its |weight| is at
      least 0.01 rms(sum), so not for a zero-initialized last scale.

    The attribute ``drop_path`` is the probability that training drops the branch for an image; 0 by default.
    """

    drop_path = 0.0

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
        if fuse not in FUSE_MODES:
            raise ValueError(f"fuse={fuse!r} is not one of {', '.join(FUSE_MODES)}")
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
        activation = first_norm.activation, first_norm.activation_param
        return self.convs(x, shortcut, activation, self.fuse, self.drop_path if self.training else 0.0)


class _Branch(nn.Sequential):
    """The layers of a post-activation branch; the last is a norm without activation."""

    def forward(  # type: ignore[override]
        self, x: Tensor, shortcut: Tensor, activation: tuple[str, float], fuse: str, drop_probability: float
    ) -> Tensor:
        """Return f(layers(x) + shortcut) in a new tensor, where images may miss layers(x)."""
        *layers, norm = self
        for layer in layers:
            x = layer(x)
        if drop_probability:
            return activate_(drop_path(norm(x), drop_probability) + shortcut, *activation)
        if fuse != "never" and _can_fuse(norm, x, shortcut, activation, in_half=fuse == "always"):
            return norm(x, shortcut=shortcut, activation=activation)  # keyword arguments: hooks get x as the only input
        return activate_(norm(x) + shortcut, *activation)


def _can_fuse(norm: Any, x: Tensor, shortcut: Tensor, activation: tuple[str, float], in_half: bool) -> bool:
    """Return whether the norm can add the shortcut, activate the sum, and recover it precisely enough."""
    return (
        type(norm).forward is InPlaceABN.forward  # an overridden forward may not accept a shortcut
        and norm.activation == "identity"
        and activation[0] in norm.activations
        and not is_fx_proxy(x)
        and (x.shape, x.dtype) == (shortcut.shape, shortcut.dtype)
        and (in_half or x.dtype in (torch.float32, torch.float64))
    )


class IdentityResidualBlock(nn.Module):
    """Pre-activation block, x + branch(norm(x)), He et al. 2016 (identity mappings); does not modify x.

    The projection, if any, reads the output of the first norm.

    Args:
    - `in_channels`: channels of x.
    - `channels`: output channels of the convolutions: two for a basic block, three for a bottleneck.
    - `norm`: channels -> norm with activation.
    - `stride`: stride of the first convolution and of the projection.
    - `groups`: groups of a bottleneck's 3x3 convolution.
    - `dilation`: dilation of the 3x3 convolutions.
    - `dropout`: probability of dropping a whole channel before the last convolution.

    The attribute ``drop_path`` is the probability that training drops the branch for an image; 0 by default.
    """

    drop_path = 0.0

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
            raise ValueError(f"groups={groups} needs a bottleneck (three numbers of channels), got {tuple(channels)}")
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
        y = self.convs(activated)  # a convolution's output, which nothing else reads
        if self.drop_path and self.training:
            y = drop_path(y, self.drop_path)
        return y.add_(shortcut) if can_work_in_place() else y + shortcut


def _without_activation(norm: Any) -> Any:
    if not hasattr(norm, "activation"):
        raise ValueError(
            f"{type(norm).__name__} has no attribute `activation`, which post-activation ResNets set to identity; use "
            "norms that have one (ABN, InPlaceABN, InPlaceABNSync)"
        )
    norm.activation = "identity"
    return norm


def build_stage(blocks: OrderedDict[str, nn.Module], memory: str) -> nn.Sequential:
    """Return the residual blocks as one module that runs them in order, checkpointed if ``memory`` says so."""
    return CheckpointedSequential(blocks) if memory == "checkpoint" else nn.Sequential(blocks)
