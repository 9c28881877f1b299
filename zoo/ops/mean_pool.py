"""Mean pooling that keeps nothing for backward but a shape; torch's keeps its input to read the shape off."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_pool2d(x: Tensor) -> Tensor:
    """Return the means of the 2x2 windows of x (N, C, H, W); a last odd row or column is left out, as by torch's."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):  # a stand-in of torch.fx
        return F.avg_pool2d(x, 2)
    return _MeanPool.apply(x)


class _MeanPool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        (x,) = inputs
        ctx.height, ctx.width = x.shape[2:]
        channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        ctx.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        dx = F.interpolate((dz / 4).contiguous(memory_format=ctx.memory_format), scale_factor=2, mode="nearest")
        rest = (0, ctx.width - dx.shape[3], 0, ctx.height - dx.shape[2])
        return F.pad(dx, rest) if any(rest) else dx
