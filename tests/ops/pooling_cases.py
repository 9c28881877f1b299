"""Cases of maximum pooling, in which every back end has the bits of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.threads import num_threads
from zoo.ops.pooling import max_pool2d

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = ["float64", "float32", "bfloat16", "float16"]
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Case(NamedTuple):
    """The shape of the map, the arguments of the pooling, and the ``values`` of the map, see `make`."""

    shape: tuple[int, ...]
    window: tuple[Any, ...]  # size, stride, padding, dilation, ceil_mode
    values: str = "ties"


CASES = {
    "the stem's": Case((2, 3, 12, 9), (3, 2, 1)),
    "2x2": Case((1, 5, 6, 8), (2, 2, 0)),
    "overlapping": Case((1, 2, 7, 7), (3, 1, 1)),
    "with gaps": Case((2, 2, 11, 10), (2, 4, 0)),
    "uneven and dilated": Case((1, 3, 13, 17), ((2, 4), (3, 2), (1, 2), (3, 2))),
    "rounded up": Case((2, 3, 8, 11), (3, 2, 0, 1, True)),
    "one output": Case((3, 2, 2, 2), (3, 2, 1)),
    "wider than the map": Case((1, 2, 1, 3), (6, 1, 3)),
    "one pixel": Case((3, 2, 1, 1), (3, 2, 1)),
    "no images": Case((0, 3, 6, 6), (3, 2, 1)),
    "zeros of both signs": Case((2, 40, 9, 8), (3, 2, 1), "zeros"),
}
#: Maps of many vectors, and planes that the CPU kernels read in several bands.
LARGE = {
    **{
        f"many vectors {window}": Case((2, 70, 23, 25), window)
        for window in [(3, 2, 1), (2, 2), (3, 1, 1), (5, 1, 2), (3, 3, 0, 2)]
    },
    **{
        f"many bands {window}": Case((1, 2, 203, 211), window, "infinite")
        for window in [(3, 2, 1), (2, 3), (3, 1, 1), ((1, 200), 2), (3, 5, 1, 30), ((16, 3), 2, (8, 1))]
    },
    "all 16-bit values": Case((1, 4, 128, 128), (2, 2), "every"),
}


def make(case: Case, dtype: str, layout: str) -> Tensor:
    """Return a map with many equal values, NaN and infinities, or zeros of both signs, or all values of 16 bits."""
    generator = torch.Generator().manual_seed(0)
    if case.values == "every":
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16)[torch.randperm(2**16, generator=generator)]
        half = torch.float16 if dtype == "float16" else torch.bfloat16
        x = every.view(half).view(case.shape)
    else:
        x = torch.randint(-3, 4, case.shape, generator=generator).double()
    if case.values == "zeros":
        x = x.sign() * 0.0
    elif case.values == "infinite":
        x[0, 0, :50] = x[0, 1, :, :150] = -torch.inf
    elif case.values == "ties":
        x.view(-1)[1::7] = -torch.inf
        x.view(-1)[3::29] = torch.inf
        x.view(-1)[5::31] = torch.nan
    return x.to(getattr(torch, dtype)).contiguous(memory_format=LAYOUTS[layout])


def step(pool: Callable[..., Tensor], x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    """Return output and gradient of a pooling for a gradient with distinct numbers whose sums are exact."""
    leaf = x.detach().requires_grad_()
    z = pool(leaf, *window)
    numbers = (torch.arange(z.numel(), device=x.device) % 61 - 30).to(x.dtype).view(z.shape)
    return z.detach(), torch.autograd.grad(z, leaf, -z.detach() if not x.any() else numbers)[0]


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether dtypes, strides and bits are the same; NaN may have any bits."""
    integers = INTEGERS[theirs.element_size()]
    bits = (torch.where(x.isnan(), 7, x).cpu().contiguous().view(integers) for x in (ours, theirs))
    same_nan = torch.equal(ours.isnan().cpu(), theirs.isnan())
    return ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and same_nan and torch.equal(*bits)


def is_torchs(case: Case, dtype: str, layout: str, device: str = "cpu") -> bool:
    """Return whether output and gradient have the bits and the layout of torch's on the CPU."""
    x = make(case, dtype, layout)
    results = step(max_pool2d, x.to(device), *case.window), step(F.max_pool2d, x, *case.window)
    return all(map(same_bits, *results))


def report(device: str, back_end: str) -> dict[str, dict[str, bool]]:
    """Return for each case, by dtype and layout, whether a back end has the bits of torch."""
    kinds = [(dtype, layout) for dtype in DTYPES for layout in LAYOUTS]
    if back_end != "triton" or device != "cpu":
        results = {}
        for cases, threads in ((CASES, 1), (LARGE, 3)):
            with num_threads(threads):
                for name, case in cases.items():
                    results[name] = {" ".join(kind): is_torchs(case, *kind, device) for kind in kinds}
        return results
    from zoo.ops import pooling_triton

    few = [("float32", "contiguous"), ("float32", "channels_last")]  # the interpreter is slow
    with patch.object(pooling_triton, "forward", wraps=pooling_triton.forward) as started:
        results = {
            name: {" ".join(kind): is_torchs(case, *kind) for kind in (kinds if name == "the stem's" else few)}
            for name, case in CASES.items()
        }
    assert started.call_count == sum(map(len, results.values())) - len(results["no images"])
    with patch.object(pooling_triton, "TILE", 256):
        results["several programs"] = {"float32 contiguous": is_torchs(CASES["the stem's"], "float32", "contiguous")}
    return results
