"""Convolutions without bias and without torch's initialization, which `init_weights` would overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def uninitialized(kind: Callable[..., Layer], *arguments: Any, **options: Any) -> Layer:
    """Return a convolution or linear layer on the default device with uninitialized weights.

    Unlike `torch.nn.utils.skip_init`, it does not import torch's code for the meta device, which takes a third of a
    second.
    """
    layer = kind(*arguments, **options, device="meta")
    device = torch.get_default_device()
    if device.type != "meta":
        for name, weight in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=device)))
    return layer


def conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """Return an uninitialized convolution without bias; its padding preserves height and width at stride 1."""
    return uninitialized(
        nn.Conv2d,
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=dilation * (kernel_size // 2),
        groups=groups,
        dilation=dilation,
        bias=False,
    )
