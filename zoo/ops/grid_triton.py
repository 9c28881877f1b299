# mypy: disable-error-code="no-untyped-def"
"""A sum on the grid with its summary, in one pass: a Triton kernel."""

from __future__ import annotations

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

TILE = 4096
WARPS = 4


@triton.jit
def sum_kernel(out, summary, x, r, scale, step, numel, SUBTRACTS: tl.constexpr, TILE: tl.constexpr):
    """Write x + round(r scale) step, or x - round(r scale) step.

    Updates ``summary``: adds to its digest, and raises its largest magnitude.
    """
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = offsets < numel
    value = tl.load(x + offsets, mask=inside, other=0)
    scaled = tl.load(r + offsets, mask=inside, other=0) * scale
    below = tl.floor(scaled)
    above = scaled - below  # exact
    is_odd = tl.floor(below * 0.5) * 2 != below
    rounded = tl.where((above > 0.5) | ((above == 0.5) & is_odd), below + 1, below) * step
    total = value - rounded if SUBTRACTS else value + rounded
    tl.store(out + offsets, total, mask=inside)
    bits = (total if SUBTRACTS else value).to(tl.int32, bitcast=True)
    magnitudes = total.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Neither depends on the order of the programs: integers wrap around. Masked elements are 0.
    tl.atomic_add(summary, tl.sum((bits * (2 * bits + 1)).to(tl.int64)).to(tl.int32))
    tl.atomic_max(summary + 1, tl.max(magnitudes))


def sum_into(out: Tensor, summary: Tensor, x: Tensor, r: Tensor, scale: float, subtracts: bool) -> None:
    """Overwrite ``out`` and ``summary``; see `zoo.ops.grid.sum_on_grid`. ``out`` may be x."""
    summary.zero_()
    with torch.cuda.device_of(x):
        sum_kernel[(triton.cdiv(x.numel(), TILE),)](
            out, summary, x, r, scale, 1 / scale, x.numel(), SUBTRACTS=subtracts, TILE=TILE, num_warps=WARPS
        )
