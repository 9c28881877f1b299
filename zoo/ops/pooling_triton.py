# mypy: disable-error-code="no-untyped-def"
"""Maximum pooling on CUDA: the Triton kernels of zoo/ops/pooling.py and their launchers.

The outputs in forward, and the elements of the map in backward, are indexed as (outer, inner): (pixel, channel) in
channels_last, (row of a plane, column) in contiguous memory. A program handles a tile of ROWS by COLS. Backward sums
the gradients of an element in the order of the outputs, without atomics, so results are reproducible bit for bit. Half
precision is accumulated in float32.
"""

from __future__ import annotations

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

TILE = 1024
WARPS = 4


@triton.jit
def locate(lines, columns, channels, CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return image (or plane), row, column and channel of each element of a tile, and a mask of valid columns."""
    inner = channels if CHANNELS_LAST else columns
    chunks = tl.cdiv(inner, COLS)
    outer = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) % chunks * COLS + tl.arange(0, COLS)[None, :]
    if CHANNELS_LAST:
        column = (outer % columns).to(tl.int32)
        outer = outer // columns
        channel = cols
    else:
        column = cols
        channel = cols * 0
    image = outer // lines
    return image, (outer % lines).to(tl.int32), column, channel, cols < inner


@triton.jit
def maxima(z, place, x, images, height, width, rows, columns, channels,
            SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
            PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
            ACC: tl.constexpr, CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Write the maximum of each window and its position: the first of equal maxima inside the map, the last NaN."""
    image, row, column, channel, exists = locate(rows, columns, channels, CHANNELS_LAST, ROWS, COLS)
    exists = exists & (image < images)
    depth = channels if CHANNELS_LAST else 1
    best = tl.full((ROWS, COLS), float("-inf"), ACC)
    found = tl.full((ROWS, COLS), -1, tl.int32)
    for k in range(SIZE_H):
        line = row * STEP_H - PAD_H + k * DILATION_H
        for m in tl.static_range(SIZE_W):
            element = column * STEP_W - PAD_W + m * DILATION_W
            inside = exists & (line >= 0) & (line < height) & (element >= 0) & (element < width)
            offset = ((image * height + line) * width + element) * depth + channel
            value = tl.load(x + offset, mask=inside, other=0).to(ACC)
            larger = inside & ((value > best) | (value != value) | (found < 0))
            best = tl.where(larger, value, best)
            found = tl.where(larger, k * SIZE_W + m, found)
    offset = ((image * rows + row) * columns + column) * depth + channel
    tl.store(z + offset, best.to(z.dtype.element_ty), mask=exists)
    tl.store(place + offset, tl.maximum(found, 0).to(tl.uint8), mask=exists)


@triton.jit
def gradient(dx, dz, place, images, height, width, rows, columns, channels,
             SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
             PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
             ACC: tl.constexpr, CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Write, for each element, the sum of the gradients of the windows in which it is the maximum."""
    image, line, element, channel, exists = locate(height, width, channels, CHANNELS_LAST, ROWS, COLS)
    exists = exists & (image < images)
    depth = channels if CHANNELS_LAST else 1
    REACH_H: tl.constexpr = (SIZE_H - 1) * DILATION_H
    REACH_W: tl.constexpr = (SIZE_W - 1) * DILATION_W
    # The first window that may contain the element. Division rounds toward zero, so dividends must not be negative.
    first_row = (line + PAD_H + STEP_H * REACH_H - REACH_H + STEP_H - 1) // STEP_H - REACH_H
    first_column = (element + PAD_W + STEP_W * REACH_W - REACH_W + STEP_W - 1) // STEP_W - REACH_W
    total = tl.zeros((ROWS, COLS), ACC)
    for i in range(REACH_H // STEP_H + 1):
        row = first_row + i
        down = line + PAD_H - row * STEP_H
        holds_row = exists & (row >= 0) & (row < rows) & (down >= 0) & (down % DILATION_H == 0)
        for j in tl.static_range(REACH_W // STEP_W + 1):
            column = first_column + j
            right = element + PAD_W - column * STEP_W
            holds = holds_row & (column >= 0) & (column < columns) & (right >= 0) & (right % DILATION_W == 0)
            offset = ((image * rows + row) * columns + column) * depth + channel
            number = tl.load(place + offset, mask=holds, other=0).to(tl.int32)
            value = tl.load(dz + offset, mask=holds, other=0).to(ACC)
            own = holds & (number == down // DILATION_H * SIZE_W + right // DILATION_W)
            total += tl.where(own, value, 0)
    offset = ((image * height + line) * width + element) * depth + channel
    tl.store(dx + offset, total.to(dx.dtype.element_ty), mask=exists)


IntPair = tuple[int, int]


def forward(
    z: Tensor, place: Tensor, x: Tensor, size: IntPair, stride: IntPair, padding: IntPair, dilation: IntPair
) -> None:
    """Overwrite z and ``place``, which have the layout of x, with the maxima of x and their positions."""
    _launch_tiles(maxima, z, (z, place, x), x, z, (size, stride, padding, dilation))


def backward(
    dx: Tensor, dz: Tensor, place: Tensor, size: IntPair, stride: IntPair, padding: IntPair, dilation: IntPair
) -> None:
    """Overwrite dx, which has the layout of dz and ``place``, with the gradient of the map."""
    _launch_tiles(gradient, dx, (dx, dz, place), dx, dz, (size, stride, padding, dilation))


def _launch_tiles(
    kernel, target: Tensor, tensors: tuple[Tensor, ...], map_: Tensor, output: Tensor, window: tuple[IntPair, ...]
) -> None:
    """Launch a kernel on tiles of ``target``."""
    images, channels, lines, columns = target.shape
    channels_last = not all(tensor.is_contiguous() for tensor in tensors)
    images = images if channels_last else images * channels
    outer, inner = (images * lines * columns, channels) if channels_last else (images * lines, columns)
    cols = min(triton.next_power_of_2(inner), 128)
    rows = TILE // cols
    constants = {
        f"{name}_{axis}": number
        for name, pair in zip(("SIZE", "STEP", "PAD", "DILATION"), window, strict=True)
        for axis, number in zip("HW", pair, strict=True)
    }
    constants |= {"CHANNELS_LAST": channels_last, "ROWS": rows, "COLS": cols}
    constants["ACC"] = tl.float64 if target.dtype == torch.float64 else tl.float32
    sides = images, *map_.shape[2:], *output.shape[2:], channels
    grid = (-(-outer // rows) * -(-inner // cols),)
    with torch.cuda.device_of(target):
        kernel[grid](*tensors, *sides, **constants, num_warps=WARPS, enable_fp_fusion=False)  # no products
