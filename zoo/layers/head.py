"""The classifier of all networks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init


class GlobalAvgPool2d(nn.Module):
    """Mean over the map: (N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of each channel's map."""
        return x.flatten(2).mean(-1)


def build_classifier(channels: int, classes: int) -> nn.Sequential:
    """Return ``avg_pool`` followed by the uninitialised linear layer ``fc``."""
    fc = skip_init(nn.Linear, channels, classes, device=torch.get_default_device())
    return nn.Sequential(OrderedDict(avg_pool=GlobalAvgPool2d(), fc=fc))
