"""Prints as JSON the results of the Triton kernel of sums on the grid in Triton's interpreter.

tests/ops/test_grid_triton.py runs it with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from zoo.ops.grid import digest, round_to_grid

CASES = {"add": False, "subtract": True}


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


def is_right(subtract: bool) -> bool:
    """Return whether the kernel is bit-identical to the separate operations, in a new tensor and in place."""
    from zoo.ops.grid_triton import sum_into

    x, r = terms()
    total, summary = expected(x, r, subtract)
    for out in (torch.empty_like(x), x):
        found = torch.full((2,), 7, dtype=torch.int32)
        sum_into(out, found, x, r, 2.0**14, subtract)
        if not (torch.equal(out.view(torch.int32), total.view(torch.int32)) and torch.equal(found, summary)):
            return False
    return True


if __name__ == "__main__":
    print(json.dumps({name: is_right(subtract) for name, subtract in CASES.items()}))
