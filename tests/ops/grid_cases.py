"""Sums on the grid, in which every back end has the bits of separate operations."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.pooling_cases import LAYOUTS
from zoo.ops.grid import digest, round_to_grid, sum_on_grid

CASES = {f"{sign} {layout}": (sign == "subtract", layout) for sign in ("add", "subtract") for layout in LAYOUTS}


def terms() -> tuple[Tensor, Tensor]:
    """Return x on a grid of 14 bits and r, with ties, infinities and values that round to zero."""
    torch.manual_seed(0)
    x = round_to_grid(torch.randn(3, 17, 15, 13), 14)
    r = torch.randn(3, 17, 15, 13)
    r.view(-1)[:8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -(2.0**20), torch.inf]) * 2.0**-14
    return x, r


def expected(x: Tensor, r: Tensor, subtract: bool) -> tuple[Tensor, Tensor]:
    """Return the sum, and its summary, by one operation of torch after the other."""
    rounded = round_to_grid(r, 14)
    total = x - rounded if subtract else x + rounded
    return total, torch.stack([digest(total if subtract else x), total.abs().max().view(torch.int32)])


def is_right(name: str, device: str, back_end: str) -> bool:
    """Return whether sum and summary are bit-identical to separate operations, in a new tensor and in place."""
    subtract, layout = CASES[name]
    x, r = (term.contiguous(memory_format=LAYOUTS[layout]) for term in terms())
    total, summary = expected(x, r, subtract)
    x, r = x.to(device), r.to(device)
    for out in (None, x):
        found, its_summary = sum_on_grid(x, r, 14, subtract, out)
        assert (found is x) == (out is x)
        assert (its_summary is None) == (back_end == "reference")
        same_summary = its_summary is None or torch.equal(its_summary.cpu(), summary)
        if not (same_summary and torch.equal(found.cpu().view(torch.int32), total.view(torch.int32))):
            return False
    return True


def report(device: str, back_end: str) -> dict[str, bool]:
    """Return for each case whether a back end has the bits of separate operations."""
    return {name: is_right(name, device, back_end) for name in CASES}
