"""Bilinear upsampling of logits, whole or in strips of rows, so that no map of the image's size need exist at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.ops.context import is_fx_proxy

STRIP_BYTES = 2**24  # of the strips that a whole map is made in: few enough to stay in a cache


def upsample(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Return ``logits`` (N, C, h, w) at ``size`` (H, W), bilinearly, pixels being areas (``align_corners=False``).

    Any size is possible, a smaller one too (without antialiasing). Without gradients the rows are those of
    `upsample_strips`, bit for bit, however many rows its strips have. Where autograd records, and in compiled or traced
    graphs, it is torch's own kernel, which keeps nothing for backward and differs by the rounding of sums.
    """
    if is_fx_proxy(logits) or torch.compiler.is_compiling() or (logits.requires_grad and torch.is_grad_enabled()):
        return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
    z = logits.new_empty(*logits.shape[:2], *size)
    row_bytes = max(1, z.nbytes // max(1, size[0]))
    for first, strip in upsample_strips(logits, size, max(1, STRIP_BYTES // row_bytes)):
        z[:, :, first : first + strip.shape[2]] = strip
    return z


@torch.no_grad()
def upsample_strips(logits: Tensor, size: Sequence[int], num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield what `upsample` returns in strips: the number of the first row, and ``num_rows`` rows (N, C, rows, W).

    Row i of H is (1 - t) a + t b, where a and b are rows j and j + 1 of h, upsampled to W columns, and
    j + t = max(0, (i + 1/2) h / H - 1/2), j + 1 at most h - 1. Only the rows that a strip needs are upsampled to W
    columns, when it is asked for. The last strip may have fewer rows. No gradients are recorded.
    """
    height, (rows, columns) = logits.shape[2], size
    position = ((torch.arange(rows, dtype=torch.float64) + 0.5) * (height / rows) - 0.5).clamp_(min=0)
    above = position.long().clamp_(max=height - 1)
    below = (above + 1).clamp_(max=height - 1)
    share = (position - above).to(logits.device, logits.dtype).view(-1, 1)
    for first in range(0, rows, num_rows):
        part = slice(first, first + num_rows)
        low, end = int(above[part][0]), int(below[part][-1]) + 1
        wide = F.interpolate(logits[:, :, low:end], size=(end - low, columns), mode="bilinear", align_corners=False)
        a, b = ((row[part] - low).to(logits.device) for row in (above, below))
        yield first, torch.lerp(wide.index_select(2, a), wide.index_select(2, b), share[part])
