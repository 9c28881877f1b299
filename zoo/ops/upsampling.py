"""Bilinear upsampling of logits, whole or in strips of rows to limit memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.context import is_fx_proxy


def upsample(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Resize ``logits`` (N, C, h, w) to ``size`` (H, W), bilinearly with ``align_corners=False``.

    Smaller sizes are allowed (no antialiasing). Without gradients, the result equals `upsample_strips` bit for
    bit, for any number of rows per strip. With gradients, and in compiled or traced graphs, it comes from torch's
    kernel, which saves nothing for backward and differs by rounding.

    The result is float32, or the dtype of the logits if that is wider. Half precision would round interpolated values
    again, and change the class of many pixels near class boundaries.
    """
    logits = _at_least_float32(logits)
    if is_fx_proxy(logits) or torch.compiler.is_compiling() or (logits.requires_grad and torch.is_grad_enabled()):
        return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
    ((_, whole),) = upsample_strips(logits, size, max(1, size[0]))
    return whole


@torch.no_grad()
def upsample_strips(logits: Tensor, size: Sequence[int], num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the result of `upsample` in strips: the index of the first row, and ``num_rows`` rows (N, C, rows, W).

    Row i of H is (1 - t) a + t b, where a and b are rows j and j + 1 of h, upsampled to W columns, and
    j + t = max(0, (i + 1/2) h / H - 1/2), with j + 1 at most h - 1. The columns are interpolated once for all strips,
    before the rows. The last strip may have fewer rows. No gradients are recorded.
    """
    logits = _at_least_float32(logits)
    height, (rows, columns) = logits.shape[2], size
    wide = F.interpolate(logits, size=(height, columns), mode="bilinear", align_corners=False)
    product = torch.empty_like(wide[:, :, 0])
    for first in range(0, rows, num_rows):
        strip = wide.new_empty(*wide.shape[:2], min(num_rows, rows - first), columns)
        for index, row in enumerate(strip.unbind(2), start=first):
            position = max(0.0, (index + 0.5) * height / rows - 0.5)
            above = min(int(position), height - 1)
            weight, below = position - above, min(above + 1, height - 1)
            # Product, product, sum, each rounded separately: the same bits for every height of strips. Gathering the
            # rows of a strip first takes twice its memory, and much longer where allocation is slow.
            torch.mul(wide[:, :, above], 1 - weight, out=row)
            row.add_(torch.mul(wide[:, :, below], weight, out=product))
        yield first, strip


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
