"""Maximum pooling that keeps one byte per output for backward: neither its input nor torch's 64-bit indices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.utils import _pair

from zoo.ops.recorded import is_recorded

Pair = int | tuple[int, int]


class Window(NamedTuple):
    """Size, stride, padding and dilation of a pooling window, each (rows, columns), and the rounding of the output."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool


def max_pool2d(
    x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair = 0, dilation: Pair = 1, ceil_mode: bool = False
) -> Tensor:
    """Return `torch.nn.functional.max_pool2d` of the same arguments; its gradient is torch's, bit for bit.

    Backward keeps the place of each maximum within its window, one byte per output.  Windows of more than 256 places
    take torch's own pooling, and so do torch.compile, which keeps bytes by itself, and `torch.func`.  Gradients can be
    taken once, not twice.
    """
    window = Window(_pair(kernel_size), _pair(stride), _pair(padding), _pair(dilation), ceil_mode)
    if not (x.requires_grad and is_recorded()) or window.size[0] * window.size[1] > 256:
        return F.max_pool2d(x, *window)
    return _MaxPool.apply(x, window)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        z, index = torch.ops.aten.max_pool2d_with_indices(x, *window)
        distances = _distances(window, x.shape, x.device)
        # Where a map is narrower than the window two places have one distance: either stands for the same element.
        places = torch.zeros(_farthest(window, x.shape) + 1, dtype=torch.uint8, device=x.device)
        places[distances] = torch.arange(len(distances), dtype=torch.uint8, device=x.device)
        place = _look_up(places, index.sub_(_corners(window, x.shape, z)))
        ctx.save_for_backward(place)
        ctx.window, ctx.shape = window, x.shape
        channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        ctx.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        window, shape = ctx.window, ctx.shape
        index = _look_up(_distances(window, shape, dz.device), place.int()).add_(_corners(window, shape, dz))
        dx = torch.empty(shape, dtype=dz.dtype, device=dz.device, memory_format=ctx.memory_format)
        # Of its second argument, the input, the operation reads shape and layout only: dx stands for it.
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(dz, dx, *window, index, grad_input=dx)
        return dx, None


def _distances(window: Window, shape: torch.Size, device: torch.device) -> Tensor:
    """Return how far each place of a window is from its first corner, in elements of a map of that shape."""
    rows, columns = (
        torch.arange(size, device=device) * dilation
        for size, dilation in zip(window.size, window.dilation, strict=True)
    )
    return (rows.view(-1, 1) * shape[-1] + columns).flatten()


def _farthest(window: Window, shape: torch.Size) -> int:
    (rows, columns), dilation = window.size, window.dilation
    return (rows - 1) * dilation[0] * shape[-1] + (columns - 1) * dilation[1]


def _corners(window: Window, shape: torch.Size, z: Tensor) -> Tensor:
    """Return the flat index of each window's first corner, (rows, columns) of the output z."""
    rows, columns = (
        torch.arange(length, device=z.device) * stride - padding
        for length, stride, padding in zip(z.shape[-2:], window.stride, window.padding, strict=True)
    )
    return rows.view(-1, 1) * shape[-1] + columns


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return the table's entries at a dense ``index``, in the same layout."""
    in_memory_order = index.as_strided((index.numel(),), (1,))
    return table.index_select(0, in_memory_order).as_strided(index.shape, index.stride())
