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

# Leaf calls in torch.fx graphs: both need tensor sizes, which proxies do not have.
torch.fx.wrap("window_mean2d")
torch.fx.wrap("extend_windows")

_STANDARD = norm_act("standard")


class DeeplabV3(nn.Module):
    """Atrous spatial pyramid pooling: a 1x1 and three dilated 3x3 convolutions, and an average-pooled branch.

    ``red_bn(red_conv(map_bn(cat(map_convs(x)))) + pool_red_conv(global_pooling_bn(global_pooling_conv(mean(x)))))``,
    where each norm includes its activation. A 1x1 convolution of concatenated maps is the sum of one convolution per
    map, so this equals the paper's head, which concatenates all five branches and reduces them by one convolution.

    In training the pooled branch averages the whole map of each image. In evaluation it averages a window of
    ``pooling_size`` around each position, shifted to lie within the map; the whole map if ``pooling_size`` is None or
    the map fits into the window. A window the size of the training crops gives the branch the field of view that it
    was trained with. 1x1 convolutions and replicated borders commute with the mean. The mean is therefore taken over
    ``hidden_channels`` instead of ``in_channels`` maps, and expanded to the size of the map last.

    Convolutions are initialized as published: Xavier-normal with the gain of the norms' activation.

    Args:
    - `in_channels`: channels of the input (N, in_channels, H, W), which is not modified.
    - `out_channels`: channels of the output (N, out_channels, H, W).
    - `hidden_channels`: channels of each of the five branches.
    - `dilations`: dilations of the three 3x3 convolutions.
    - `norm_act`: function channels -> norm with its activation; default standard batch norm and leaky ReLU.
    - `pooling_size`: window in evaluation, in cells of the map: a number, or (rows, columns). None: the whole map.
      A plain attribute, read in each call.

    Raises ConfigError in training if the norm of the pooled branch gets one value per channel, as it does for a batch
    of one image unless the norm is synchronized with other processes.

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
        if not self.red_conv.weight.is_meta:  # tensors on the meta device have no values
            activation = getattr(self.red_bn, "activation", "leaky_relu")
            init_weights(self, activation=activation, activation_param=getattr(self.red_bn, "activation_param", 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized and activated map (N, out_channels, H, W) in a new tensor."""
        means = self.pool_red_conv(self._pool(x))  # first: an error must leave all running statistics unchanged
        maps = self.red_conv(self.map_bn(torch.cat([conv(x) for conv in self.map_convs], dim=1)))
        return self.red_bn(maps + extend_windows(means, x))

    def _pool(self, x: Tensor) -> Tensor:
        """Return the normalized and activated means of the pooled branch, (N, hidden_channels, h, w)."""
        if not self.training and self.pooling_size is not None:
            return self.global_pooling_bn(window_mean2d(self.global_pooling_conv(x), self.pooling_size))
        means = self.global_pooling_conv(x.mean((2, 3), keepdim=True))
        try:
            return self.global_pooling_bn(means)
        except ValueError as error:
            if len(means) > 1:
                raise
            raise ConfigError(
                "the norm of the head's pooled branch (global_pooling_bn) gets one value per channel, which has no "
                "variance, because this process trains with a single crop; use norms that are synchronized over the "
                'processes of a run (norm="sync"), freeze the norms (zoo.layers.freeze_norms), or give '
                "each process a batch of at least two"
            ) from error
