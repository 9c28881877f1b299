"""The head of DeepLabV3 (Chen et al. 2017) as published with InPlace-ABN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.conv import conv2d
from zoo.layers.init import init_weights
from zoo.layers.norm import NormFactory, norm_act
from zoo.ops.pooling import extend_windows, window_mean2d

# One call each in a traced graph, where no tensor has a size.
torch.fx.wrap("window_mean2d")
torch.fx.wrap("extend_windows")

_STANDARD = norm_act("standard")


class DeeplabV3(nn.Module):
    """Context of several ranges: a 1x1 and three dilated 3x3 convolutions, beside the mean of a large window.

    ``red_bn(red_conv(map_bn(cat(map_convs(x)))) + pool_red_conv(global_pooling_bn(global_pooling_conv(mean(x)))))``,
    where each norm activates too. As a 1x1 convolution of concatenated maps is the sum of one of each, this is the head
    of the paper, too, which concatenates five times ``hidden_channels`` maps and reduces them by one convolution.

    In training the mean is that of the whole map of each image. In evaluation it is that of the window of
    ``pooling_size`` around each place, or of the nearest window that lies within the map; with None, and for a map
    within the window, that of the whole map. A window of the size that crops had in training sees as much as the mean
    was trained with. As convolutions of 1x1 and repeated edges commute with it, it is taken of ``hidden_channels`` maps
    and not of ``in_channels``, and extended to the size of the map last.

    Convolutions are initialised as published: Xavier-normal with the gain of the norms' activation.

    Args:
    - `in_channels`: channels of the input (N, in_channels, H, W), which is left as it is.
    - `out_channels`: channels of the output (N, out_channels, H, W).
    - `hidden_channels`: channels of each of the five branches.
    - `dilations`: of the three 3x3 convolutions.
    - `norm_act`: function channels -> norm with its activation; default standard batch norm and leaky ReLU.
    - `pooling_size`: the window of evaluation in cells of the map: a number, or (rows, columns); None: the whole map.
      It is a plain attribute, read at each call.

    Raises ConfigError in training where the norm of the means would see one value per channel: a single image, unless
    the norm takes its statistics over other processes, too.

    Source: Rota Bulo et al., In-Place Activated BatchNorm, CVPR 2018, section 4.2, and its code.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden_channels: int = 256,
        dilations: Sequence[int] = (12, 24, 36),
        norm_act: NormFactory = _STANDARD,
        pooling_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.pooling_size = pooling_size
        self.map_convs = nn.ModuleList(
            [
                conv2d(in_channels, hidden_channels, 1),
                *(conv2d(in_channels, hidden_channels, 3, dilation=dilation) for dilation in dilations),
            ]
        )
        self.map_bn = norm_act(hidden_channels * len(self.map_convs))
        self.red_conv = conv2d(hidden_channels * len(self.map_convs), out_channels, 1)
        self.global_pooling_conv = conv2d(in_channels, hidden_channels, 1)
        self.global_pooling_bn = norm_act(hidden_channels)
        self.pool_red_conv = conv2d(hidden_channels, out_channels, 1)
        self.red_bn = norm_act(out_channels)
        if not self.red_conv.weight.is_meta:  # where there are no values to set
            activation = getattr(self.red_bn, "activation", "leaky_relu")
            init_weights(self, activation=activation, activation_param=getattr(self.red_bn, "activation_param", 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """Return the map of contexts, (N, out_channels, H, W), normalised and activated, in a new tensor."""
        means = self.pool_red_conv(self._pool(x))  # first, so that no norm has counted a batch that is refused
        maps = self.red_conv(self.map_bn(torch.cat([conv(x) for conv in self.map_convs], dim=1)))
        return self.red_bn(maps + extend_windows(means, x))

    def _pool(self, x: Tensor) -> Tensor:
        """Return the normalised and activated means of the pooled branch, (N, hidden_channels, h, w)."""
        if not self.training and self.pooling_size is not None:
            return self.global_pooling_bn(window_mean2d(self.global_pooling_conv(x), self.pooling_size))
        means = self.global_pooling_conv(x.mean((2, 3), keepdim=True))
        try:
            return self.global_pooling_bn(means)
        except ValueError as error:
            if len(means) > 1:
                raise
            raise ConfigError(
                "the norm of the head's pooled branch (global_pooling_bn) sees one value per channel, which has no "
                "variance, as this process trains with a single crop; use norms that are synchronised over the "
                'processes of a run (norm="sync"), freeze the norms (zoo.layers.freeze_norms), or give '
                "each process a batch of at least two"
            ) from error
