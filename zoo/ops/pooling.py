"""Pooling that keeps less for backward than torch's: a byte per maximum, and only the shape for means.

torch's maximum pooling keeps its input and 64-bit indices. Its mean pooling keeps the input but reads only its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.utils import _pair

from zoo.ops.context import is_fx_proxy, is_recorded

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

    Backward keeps the place of each maximum within its window, one byte per output. Windows of more than 256 places
    take torch's own pooling, and so do torch.compile, which keeps bytes by itself, and `torch.func`. Gradients can be
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
        # If a map is narrower than the window, two places may have the same distance; both stand for the same element.
        last_row, last_column = ((size - 1) * step for size, step in zip(window.size, window.dilation, strict=True))
        places = torch.zeros(last_row * x.shape[-1] + last_column + 1, dtype=torch.uint8, device=x.device)
        places[distances] = torch.arange(len(distances), dtype=torch.uint8, device=x.device)
        place = _look_up(places, index.sub_(_corners(window, x.shape, z)))
        ctx.save_for_backward(place)
        ctx.window, ctx.shape = window, x.shape
        ctx.memory_format = memory_format_of(x)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        window, shape = ctx.window, ctx.shape
        index = _look_up(_distances(window, shape, dz.device), place.int()).add_(_corners(window, shape, dz))
        dx = torch.empty(shape, dtype=dz.dtype, device=dz.device, memory_format=ctx.memory_format)
        # The operation reads only shape and layout of its second argument, the input, so that dx can stand for it.
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(dz, dx, *window, index, grad_input=dx)
        return dx, None


def _distances(window: Window, shape: torch.Size, device: torch.device) -> Tensor:
    """Return how far each place of a window is from its first corner, in elements of a map of that shape."""
    rows, columns = (
        torch.arange(size, device=device) * dilation
        for size, dilation in zip(window.size, window.dilation, strict=True)
    )
    return (rows.view(-1, 1) * shape[-1] + columns).flatten()


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


def mean_pool2d(x: Tensor) -> Tensor:
    """Return the means of the 2x2 windows of x (N, C, H, W); a last odd row or column is left out, as by torch's."""
    if torch.compiler.is_compiling() or is_fx_proxy(x):
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
        ctx.memory_format = memory_format_of(x)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Tensor:
        dx = F.interpolate((dz / 4).contiguous(memory_format=ctx.memory_format), scale_factor=2, mode="nearest")
        rest = (0, ctx.width - dx.shape[3], 0, ctx.height - dx.shape[2])
        return F.pad(dx, rest) if any(rest) else dx


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of x: channels_last, or contiguous for all other layouts."""
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def window_mean2d(x: Tensor, size: int | Sequence[int]) -> Tensor:
    """Return the means of all windows of ``size`` that lie within the maps of x (N, C, H, W).

    ``size`` is (rows, columns), or a number for both; a window is no larger than the map. The output, of the shape
    (N, C, H - rows + 1, W - columns + 1), is torch's `avg_pool2d` of stride 1, computed as means of columns of means of
    rows: rows + columns additions for a value, and not rows times columns.
    """
    rows, columns = (min(length, limit) for length, limit in zip(_pair(size), x.shape[2:], strict=True))
    return F.avg_pool2d(F.avg_pool2d(x, (rows, 1), stride=1), (1, columns), stride=1)


def extend_windows(means: Tensor, like: Tensor) -> Tensor:
    """Return the output of `window_mean2d` at the size of the maps ``like``, its edges repeated outwards.

    Of k - 1 missing rows (k - 1) // 2 are added before, and the others behind; the same with columns. A single mean is
    returned as it is, (N, C, 1, 1): it broadcasts.
    """
    if means.shape[2:] == (1, 1):
        return means
    rows, columns = (length - own for length, own in zip(like.shape[2:], means.shape[2:], strict=True))
    return F.pad(means, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2), mode="replicate")
