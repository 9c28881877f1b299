# mypy: disable-error-code="no-untyped-def"
"""A training-mode batch norm from its saved statistics, the sum with a shortcut and ReLU, in one pass: a Triton kernel.

A tensor's memory is indexed as (outer, inner): (pixel, channel) in channels_last, (plane, position) in contiguous
memory. A program handles a tile of ROWS by COLS. Each operation rounds as the separate operation does.

Tested by tests/ops/test_norm_triton.py.
"""

from __future__ import annotations

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

TILE = 4096
WARPS = 4
#: Orders of rounding: m is the mean, s the inverse standard deviation, w the weight, b the bias.
ORDERS = (
    "(x - m) (s w) + b",
    "fma(x - m, s w, b)",
    "((x - m) s) w + b",
    "fma((x - m) s, w, b)",
    "x (s w) + (b - m (s w))",
    "fma(x, s w, b - m (s w))",
    "fma(x, s w, fma(-m, s w, b))",
)


@triton.jit
def normalize_add_relu(out, x, weight, bias, mean, invstd, shortcut, outer, inner, channels,
                       ORDER: tl.constexpr, IS_RECTIFIED: tl.constexpr, CHANNELS_LAST: tl.constexpr,
                       ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Write ReLU(norm(x) + shortcut), without ReLU or shortcut if they are not given."""
    chunks = tl.cdiv(inner, COLS)
    rows = (tl.program_id(0) // chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) % chunks * COLS + tl.arange(0, COLS)[None, :]
    inside = (rows < outer) & (cols < inner)
    if CHANNELS_LAST:
        channel = cols
        exists = cols < inner
    else:
        channel = (rows % channels).to(tl.int32)
        exists = rows < outer
    m = tl.load(mean + channel, mask=exists, other=0)
    s = tl.load(invstd + channel, mask=exists, other=0)
    w = tl.load(weight + channel, mask=exists, other=0).to(m.dtype)
    b = tl.load(bias + channel, mask=exists, other=0).to(m.dtype)
    offsets = rows * inner + cols
    value = tl.load(x + offsets, mask=inside, other=0).to(m.dtype)
    if ORDER == 0:
        y = (value - m) * (s * w) + b
    elif ORDER == 1:
        y = tl.fma(value - m, s * w, b)
    elif ORDER == 2:
        y = (value - m) * s * w + b
    elif ORDER == 3:
        y = tl.fma((value - m) * s, w, b)
    elif ORDER == 4:
        y = value * (s * w) + (b - m * (s * w))
    elif ORDER == 5:
        y = tl.fma(value, s * w, b - m * (s * w))
    else:
        y = tl.fma(value, s * w, tl.fma(-m, s * w, b))
    y = y.to(out.dtype.element_ty)
    if shortcut is not None:
        other = tl.load(shortcut + offsets, mask=inside, other=0)
        y = (y.to(m.dtype) + other.to(m.dtype)).to(out.dtype.element_ty)
    if IS_RECTIFIED:
        y = tl.where(y <= 0, 0, y)  # NaN stays NaN
    tl.store(out + offsets, y, mask=inside)


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    invstd: Tensor,
    order: int,
    shortcut: Tensor | None = None,
    is_rectified: bool = False,
) -> Tensor:
    """Return ((x - mean) invstd weight + bias) + shortcut, followed by ReLU if ``is_rectified``.

    x (N, C, ...) is contiguous or channels-last, and the shortcut has its shape, dtype and strides; the vectors have
    length C. ``order`` is a position in `ORDERS`.
    """
    out = torch.empty_like(x)
    channels_last = not x.is_contiguous()
    channels = x.shape[1]
    inner = channels if channels_last else x[0, 0].numel()
    outer = x.numel() // inner
    cols = min(triton.next_power_of_2(inner), 512)
    rows = max(1, TILE // cols)
    grid = (-(-outer // rows) * -(-inner // cols),)
    with torch.cuda.device_of(x):
        normalize_add_relu[grid](
            out, x, weight, bias, mean, invstd, shortcut, outer, inner, channels,
            ORDER=order, IS_RECTIFIED=is_rectified, CHANNELS_LAST=channels_last, ROWS=rows, COLS=cols,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
