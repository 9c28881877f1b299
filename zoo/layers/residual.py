"""The pre-activation residual block of ResNeXt and WiderResNet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from zoo.layers.conv import conv2d, drop_path
from zoo.layers.norm import NormFactory, out_of_place
from zoo.ops.context import can_work_in_place
from zoo.torch_internals.data import is_plain


class IdentityResidualBlock(nn.Module):
    """Pre-activation residual block, x + branch(norm(x)). Does not modify x.

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

    Source: He et al., Identity Mappings in Deep Residual Networks, 2016.
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
        self.bn1 = out_of_place(norm(in_channels))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if len(channels) == 3:  # a bottleneck
            layers["conv1"] = conv2d(in_channels, channels[0], 1, stride=stride)
            layers["bn2"] = norm(channels[0])
            layers["conv2"] = conv2d(channels[0], channels[1], 3, groups=groups, dilation=dilation)
            layers["bn3"] = norm(channels[1])
            name, last = "conv3", conv2d(channels[1], channels[2], 1)
        else:
            layers["conv1"] = conv2d(in_channels, channels[0], 3, stride=stride, dilation=dilation)
            layers["bn2"] = norm(channels[0])
            name, last = "conv2", conv2d(channels[0], channels[1], 3, dilation=dilation)
        if dropout > 0:
            layers["dropout"] = nn.Dropout2d(dropout)
        layers[name] = last
        self.convs = nn.Sequential(layers)
        self.has_projection = stride != 1 or in_channels != channels[-1]
        if self.has_projection:
            self.proj_conv = conv2d(in_channels, channels[-1], kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output in a new tensor."""
        activated = self.bn1(x)
        shortcut = self.proj_conv(activated) if self.has_projection else x
        y = self.convs(activated)
        if self.drop_path and self.training:
            y = drop_path(y, self.drop_path)
        if can_work_in_place() and is_plain(self.convs, nn.Sequential) and is_plain(self.convs[-1], nn.Conv2d):
            return y.add_(shortcut)  # nothing else reads a convolution's output
        return y + shortcut
