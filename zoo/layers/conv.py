"""Convolutions as the networks use them: no bias, and no initialisation that the next line would overwrite."""

from __future__ import annotations

import torch
from torch import nn


def conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """Return an uninitialised convolution without bias that keeps the map's size at stride 1."""
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=dilation * (kernel_size // 2),
        groups=groups,
        dilation=dilation,
        bias=False,
        device="meta",
    )
    device = torch.get_default_device()
    return conv if device.type == "meta" else conv.to_empty(device=device)
