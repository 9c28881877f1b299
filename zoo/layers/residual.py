"""Residual blocks: post-activation (ResNet v1) and pre-activation (ResNeXt, WiderResNet)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import InPlaceABN, NormFactory, activate_, out_of_place
from zoo.layers.norm_conv import norm_conv
from zoo.ops.recorded import in_selective_checkpoint

FUSE = ("auto", "always", "never")


class ResidualBlock(nn.Module):
    """Post-activation block: f(branch(x) + shortcut(x)), He et al. 2016.

    ``channels`` holds two entries for a basic block (3x3 with the stride, 3x3; both dilated) or three for a bottleneck
    (1x1, 3x3 with the stride and dilation, 1x1).  The last norm of branch and shortcut has no activation; f is that of
    the first norm.  x is left as it is.

    ``fuse`` says whether the last norm, if it is in place, adds the shortcut and activates itself, so that only its
    result is kept and not the norm's own output beside it: "auto" in single and double precision, "always" in half
    precision too, "never".  In half precision the norm's gradient is then good as long as its |weight| is at least
    0.01 rms(sum); a last scale that starts at zero is not.
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
        bottleneck = len(channels) == 3
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        widths = [in_channels, *channels]
        for index in range(1, len(widths)):
            is_3x3 = not bottleneck or index == 2
            strided = index == (2 if bottleneck else 1)
            layers[f"conv{index}"] = conv2d(
                widths[index - 1],
                widths[index],
                kernel_size=3 if is_3x3 else 1,
                stride=stride if strided else 1,
                dilation=dilation if is_3x3 else 1,
            )
            layers[f"bn{index}"] = norm(widths[index])
        _without_activation(layers[f"bn{len(channels)}"])
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
        and isinstance(x, Tensor)  # and not a stand-in of torch.fx, which has no dtype
        and (x.shape, x.dtype) == (shortcut.shape, shortcut.dtype)
        and (in_half or x.dtype in (torch.float32, torch.float64))
    )


class IdentityResidualBlock(nn.Module):
    """Pre-activation block: x + branch(norm(x)), nothing after the sum, He et al. 2016 (identity mappings).

    ``channels`` holds two entries for a basic block (3x3 with the stride, 3x3; both dilated) or three for a bottleneck
    (1x1 with the stride, 3x3 with groups and dilation, 1x1).  A projection reads the output of the first norm, which
    never overwrites x.  ``dropout`` is the probability with which whole maps are dropped before the last convolution.

    ``keep`` makes in-place norms leave their inputs as they are, and says what backward keeps to compute their outputs
    again: "input" or "xhat" (`norm_conv`).  A norm whose output is read by more than one convolution keeps its output.
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
        keep: str | None = None,
    ) -> None:
        super().__init__()
        self.keep = keep
        bottleneck = len(channels) == 3
        if groups > 1 and not bottleneck:
            raise ValueError(f"groups={groups} needs a block of three channels, got {tuple(channels)}")
        self.bn1 = out_of_place(norm(in_channels))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        widths = [in_channels, *channels]
        for index in range(1, len(widths)):
            if index > 1:
                layers[f"bn{index}"] = norm(widths[index - 1])
            if dropout > 0 and index == len(channels):
                layers["dropout"] = nn.Dropout2d(dropout)
            is_3x3 = not bottleneck or index == 2
            layers[f"conv{index}"] = conv2d(
                widths[index - 1],
                widths[index],
                kernel_size=3 if is_3x3 else 1,
                stride=stride if index == 1 else 1,
                groups=groups if bottleneck and index == 2 else 1,
                dilation=dilation if is_3x3 else 1,
            )
        self.convs = nn.Sequential(layers)
        self.has_projection = stride != 1 or in_channels != channels[-1]
        if self.has_projection:
            self.proj_conv = conv2d(in_channels, channels[-1], kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in a new tensor."""
        if self.keep is not None:
            return self._recomputed(x, self.keep)
        activated = self.bn1(x)
        shortcut = self.proj_conv(activated) if self.has_projection else x
        return _add(self.convs(activated), shortcut)

    def _recomputed(self, x: Tensor, keep: str) -> Tensor:
        """Return the same, each norm and the convolution that it directly precedes in one operation."""
        if self.has_projection:
            activated = self.bn1(x)
            shortcut, layers = self.proj_conv(activated), list(self.convs)
            y = layers.pop(0)(activated)
        else:
            shortcut, y, layers = x, x, [self.bn1, *self.convs]
        while len(layers) > 1:
            if isinstance(layers[1], nn.Conv2d):
                y = norm_conv(layers.pop(0), layers.pop(0), y, keep=keep)
            else:  # dropout comes between
                y = layers.pop(0)(y)
        for layer in layers:  # a last convolution of another kind
            y = layer(y)
        return _add(y, shortcut)


def _add(y: Tensor, shortcut: Tensor) -> Tensor:
    """Return the sum, overwriting y, which is a convolution's output that nobody else keeps."""
    return y + shortcut if in_selective_checkpoint() else y.add_(shortcut)


def _without_activation(norm: Any) -> Any:
    if not hasattr(norm, "activation"):
        raise ValueError(
            f"{type(norm).__name__} has no attribute `activation` to set to identity: post-activation ResNets need "
            "norms that have one (as ABN, InPlaceABN and InPlaceABNSync)"
        )
    norm.activation = "identity"
    return norm
