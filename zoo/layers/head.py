"""The classifier of all networks."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from zoo.layers.conv import uninitialised


class GlobalAvgPool2d(nn.Module):
    """Mean over the map: (N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel's map."""
        return x.flatten(2).mean(-1)


def build_classifier(channels: int, classes: int, drop_rate: float = 0.0) -> nn.Sequential:
    """Return ``avg_pool``, with a ``drop_rate`` above 0 ``drop``, and the uninitialised linear layer ``fc``."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(avg_pool=GlobalAvgPool2d())
    if drop_rate > 0:
        layers["drop"] = nn.Dropout(drop_rate)
    layers["fc"] = uninitialised(nn.Linear, channels, classes)
    return nn.Sequential(layers)
