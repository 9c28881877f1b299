"""What the Triton kernel of a recomputed norm gives in Triton's interpreter, as a program that prints JSON.

tests/ops/test_norm_triton.py runs it with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPES = {"large": (3, 5, 31, 29), "no positions": (4, 7, 1, 1), "many channels": (2, 1030, 2, 1)}


def separate(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, order: int) -> Tensor:
    """Return the norm by one operation of torch after the other, where a fused multiply-add is one in float64."""
    m, s, w, b = (each.view(1, -1, 1, 1) for each in (mean, invstd, weight, bias))
    wide = x.float()

    def fma(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return (first.double() * second.double() + third.double()).float()

    results = (
        lambda: (wide - m) * (s * w) + b,
        lambda: fma(wide - m, s * w, b),
        lambda: (wide - m) * s * w + b,
        lambda: fma((wide - m) * s, w, b),
        lambda: wide * (s * w) + (b - m * (s * w)),
        lambda: fma(wide, s * w, b - m * (s * w)),
        lambda: fma(wide, s * w, fma(-m, s * w, b)),
    )
    return results[order]().to(x.dtype)


def error(shape: str, dtype: str, layout: str, order: int) -> float:
    """Return the largest difference to the separate operations, with and without a shortcut and ReLU."""
    from zoo.ops.norm_triton import normalize

    torch.manual_seed(0)
    x, shortcut = torch.randn(2, *SHAPES[shape]).to(getattr(torch, dtype)).unbind()
    x.view(-1)[3] = torch.nan
    x, shortcut = (each.contiguous(memory_format=LAYOUTS[layout]) for each in (x, shortcut))
    vectors = *torch.randn(3, x.shape[1]).unbind(), torch.rand(x.shape[1])
    y = separate(x, *vectors, order)
    found = normalize(x, *vectors, order), normalize(x, *vectors, order, shortcut, True)
    expected = y, (y + shortcut).relu()
    pairs = [(a.nan_to_num(777), b.nan_to_num(777)) for a, b in zip(found, expected, strict=True)]
    assert all(a.stride() == x.stride() and a.dtype == x.dtype for a in found)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


CASES = [("large", *kind, order) for order in range(7) for kind in zip(("float32", "float16"), LAYOUTS, strict=True)]
CASES += [(shape, "float32", layout, 0) for shape in SHAPES for layout in LAYOUTS]

if __name__ == "__main__":
    print(json.dumps({" ".join(map(str, case)): error(*case) for case in CASES}))
