"""Convolutions as the networks use them: no bias, and no initialisation that the next line would overwrite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)
_counting: ContextVar[bool] = ContextVar("counting", default=False)


def uninitialised(kind: Callable[..., Layer], *arguments: Any, **options: Any) -> Layer:
    """Return a convolution or linear layer on the default device whose weights are not initialised.

    It does what `torch.nn.utils.skip_init` does, but builds the layer only once on the meta device, where networks
    are counted, and elsewhere does not import torch's code for the meta device, which takes a third of a second.
    """
    layer = kind(*arguments, **options, device="meta")
    device = torch.get_default_device()
    if not _counting.get() and device.type != "meta":
        for name, weight in list(layer.named_parameters(recurse=False)):
            setattr(layer, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=device)))
    return layer


@contextmanager
def counting() -> Iterator[None]:
    """Make all such layers on the meta device within the block: for networks that are counted and not run.

    Norms are made as usual: they are small, and torch.device("meta") for a whole network takes twice as long. torch's
    own initialisation of a weight without values, a third of the time, is left out; it draws no random numbers.
    """
    token = _counting.set(True)
    try:
        with mock.patch.object(nn.init, "kaiming_uniform_", lambda weight, *_, **__: weight):
            yield
    finally:
        _counting.reset(token)


def conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """Return an uninitialised convolution without bias that keeps the map's size at stride 1."""
    return uninitialised(
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
