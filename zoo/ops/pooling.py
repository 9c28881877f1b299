"""Pooling that saves less for backward than torch's: one byte per output of max pooling, only the shape for means.

torch's max pooling saves its input and 64-bit indices. Its mean pooling saves the input, but reads only the shape.

`max_pool2d` calls the operator zoo::max_pool2d, which writes the maximum of each window and its position in the window
in one pass. zoo/ops/backend.py chooses the kernel: csrc/pool.cpp on the CPU or pooling_triton.py on CUDA; without
compiled kernels torch pools. Backward scatters the gradient to the saved positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.backend import back_end_for
from zoo.ops.context import is_eager, is_fx_proxy
from zoo.ops.operators import operator
from zoo.ops.second_derivatives import first_derivatives_only
from zoo.torch_internals.data import pair

IntOrPair = int | tuple[int, int]


class Window(NamedTuple):
    """Size, stride, padding and dilation of a pooling window, each (rows, columns), and the output's rounding."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    def outputs(self, sides: Sequence[int]) -> list[int] | None:
        """Return (height, width) of the output for a map of these ``sides``; None for a window that torch rejects."""
        outputs = []
        for length, size, stride, padding, dilation in zip(sides, *self[:4], strict=True):
            reach = dilation * (size - 1) + 1
            if min(length, size, stride, dilation) < 1 or not 0 <= padding <= size // 2:
                return None
            rest = length + 2 * padding - reach
            output = (rest + (stride - 1 if self.ceil_mode else 0)) // stride + 1
            if self.ceil_mode and (output - 1) * stride >= length + padding:  # the last window would start outside
                output -= 1
            if output < 1:
                return None
            outputs.append(output)
        return outputs


def max_pool2d(
    x: Tensor,
    kernel_size: IntOrPair,
    stride: IntOrPair,
    padding: IntOrPair = 0,
    dilation: IntOrPair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """`torch.nn.functional.max_pool2d` with bit-identical outputs and gradients, saving one byte per output.

    The byte is the position of the maximum within its window. torch's own pooling is used for windows of more than 256
    positions, without compiled kernels, and under torch.compile (which saves bytes itself), TorchScript and
    `torch.func`. There are no second derivatives.
    """
    window = Window(pair(kernel_size), pair(stride), pair(padding), pair(dilation), ceil_mode)
    if not is_eager() or torch.jit.is_tracing() or not _is_supported(x, window):
        return F.max_pool2d(x, *window)
    z: Tensor = _MaxPool.apply(x if x.dim() == 4 else x.contiguous()[None], window)
    return z if x.dim() == 4 else z[0]


def _is_supported(x: Tensor, window: Window) -> bool:
    """Return whether the operator can pool x; otherwise torch pools it, or raises its own error."""
    if x.dtype not in POOLED_DTYPES or x.dim() not in (3, 4):
        return False
    if window.size[0] * window.size[1] > 256 or not all(x.shape[-3:]) or back_end_for(x) == "reference":
        return False
    return window.outputs(x.shape[-2:]) is not None


POOLED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WINDOW = "SymInt[2] size, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, bool ceil_mode"
_operator = partial(operator, torch.library.Library("zoo", "FRAGMENT"))


def _new_outputs(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    sides = Window(*window).outputs(x.shape[2:])
    assert sides is not None, "max_pool2d has checked the window"
    z = torch.empty((*x.shape[:2], *sides), dtype=x.dtype, device=x.device, memory_format=memory_format_of(x))
    return z, torch.empty_like(z, dtype=torch.uint8)


@_operator(f"max_pool2d(Tensor x, {WINDOW}) -> (Tensor, Tensor)", _new_outputs)
def _pool(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    """Return the maxima and their positions in the window: row * (columns of the window) + column, uint8."""
    z, place = _new_outputs(x, *window)
    x = x.contiguous(memory_format=memory_format_of(x))
    if back_end_for(x) == "native":
        torch.ops.zoo.max_pool2d_into.default(z, place, x, *window[:4])
    elif z.numel():
        from zoo.ops import pooling_triton

        pooling_triton.forward(z, place, x, *window[:4])
    return z, place


def _new_gradient(dz: Tensor, place: Tensor, height: int, width: int, channels_last: bool, *window: Any) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((*dz.shape[:2], height, width), dtype=dz.dtype, device=dz.device, memory_format=layout)


@_operator(
    f"max_pool2d_backward(Tensor dz, Tensor place, SymInt height, SymInt width, bool channels_last, {WINDOW})"
    " -> Tensor",
    _new_gradient,
)
def _unpool(dz: Tensor, place: Tensor, height: int, width: int, channels_last: bool, *window: Any) -> Tensor:
    """Return the gradient of the pooled map, of the given height and width."""
    dx = _new_gradient(dz, place, height, width, channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    dz, place = dz.contiguous(memory_format=layout), place.contiguous(memory_format=layout)
    if back_end_for(dz) == "native":
        torch.ops.zoo.max_pool2d_backward_into.default(dx, dz, place, *window[:4])
    elif dx.numel():
        from zoo.ops import pooling_triton

        pooling_triton.backward(dx, dz, place, *window[:4])
    return dx


class _MaxPool(torch.autograd.Function):
    """The autograd function of zoo::max_pool2d."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        z, place = torch.ops.zoo.max_pool2d.default(x, *window)
        ctx.save_for_backward(place)
        ctx.arguments = *x.shape[2:], memory_format_of(x) == torch.channels_last, *window
        return z

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return torch.ops.zoo.max_pool2d_backward.default(dz, place, *ctx.arguments), None


def mean_pool2d(x: Tensor) -> Tensor:
    """Return the means of the 2x2 windows of x (N, C, H, W). As in torch, an odd last row or column is ignored."""
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
    """Return channels_last for a channels_last x of four or five dimensions, and contiguous for all other layouts."""
    if x.is_contiguous() or x.dim() not in (4, 5):
        return torch.contiguous_format
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


def window_mean2d(x: Tensor, size: int | Sequence[int]) -> Tensor:
    """Return the means of all windows inside the maps of x (N, C, H, W): `avg_pool2d` with stride 1.

    ``size`` is (rows, columns), or one number for both, and is clipped to the size of the map. The output has the shape
    (N, C, H - rows + 1, W - columns + 1). The two axes are averaged one after the other, which takes rows + columns
    additions per value instead of rows * columns.
    """
    rows, columns = (min(length, limit) for length, limit in zip(pair(size), x.shape[2:], strict=True))
    return F.avg_pool2d(F.avg_pool2d(x, (rows, 1), stride=1), (1, columns), stride=1)


def extend_windows(means: Tensor, like: Tensor) -> Tensor:
    """Return the output of `window_mean2d`, padded to the size of ``like`` by replicating its edges.

    Of k - 1 missing rows, (k - 1) // 2 are added before and the others after; likewise columns. A single mean is
    returned unchanged, (N, C, 1, 1), because it broadcasts.
    """
    if means.shape[2:] == (1, 1):
        return means
    rows, columns = (length - own for length, own in zip(like.shape[2:], means.shape[2:], strict=True))
    return F.pad(means, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2), mode="replicate")
