"""How a tensor is cut into the programs of a Triton kernel: by its shape alone, so that results repeat bit for bit."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from torch import Tensor

TILE = 2048


class Tiling(NamedTuple):
    """How a tensor's memory, (outer, groups, inner), is cut into the programs of one kernel; see triton_kernels.py."""

    outer: int
    groups: int
    units: int
    span: int
    channels_last: bool
    unit: int
    rows: int
    cols: int

    @property
    def splits(self) -> int:
        """Return how many programs share a channel."""
        pieces = -(-self.outer // self.span)
        return pieces if self.channels_last else pieces * self._chunks

    @property
    def programs(self) -> int:
        """Return how many programs there are."""
        return -(-self.outer // self.span) * self.groups * self._chunks

    @property
    def _chunks(self) -> int:
        return -(-self.units * self.unit // self.cols)


def tiling_of(x: Tensor, programs: int) -> Tiling:
    """Return the tiling of a contiguous or channels_last tensor for about ``programs`` programs."""
    batch, channels = x.shape[:2]
    area = x.numel() // (batch * channels)
    if is_channels_last(x):
        return _tiling(batch * area, 1, channels, True, programs)
    return _tiling(batch, channels, area, False, programs)


@functools.lru_cache(maxsize=1024)
def _tiling(outer: int, groups: int, inner: int, channels_last: bool, programs: int) -> Tiling:
    cols = _width(inner, 32, 128) if channels_last else _width(inner, 256, 1024)
    rows = min(TILE // cols, power_above(outer))
    pieces = max(1, programs // (groups * -(-inner // cols)))
    span = rows * -(-outer // (rows * pieces))
    # A row that 32-bit numbers do not count is passed as it is: its indices are 64-bit then.
    unit = math.gcd(inner, 16) if inner < 2**31 else 1
    return Tiling(outer, groups, inner // unit, span, channels_last, unit, rows, cols)


def _width(length: int, smallest: int, largest: int) -> int:
    """Return the widest power of two that pads ``length`` by at most a quarter, or else the least."""
    if length <= smallest:
        return power_above(length)
    padded = {
        width: -(-length // width) * width for width in (largest, largest // 2, largest // 4) if width >= smallest
    }
    return next((width for width in padded if padded[width] <= 1.25 * length), min(padded, key=padded.__getitem__))


def power_above(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def is_channels_last(x: Tensor) -> bool:
    """Return whether x is a dense (N, ..., C) tensor; True as well where there is one position per image."""
    return x.shape[1] > 1 and x.stride(1) == 1 and x.movedim(1, -1).is_contiguous()
