"""The cases of maximum pooling for the Triton kernels; as a program, prints their results in Triton's interpreter.

tests/ops/test_pooling_triton.py runs the program with TRITON_INTERPRET=1, which has to be set before Triton is
imported.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

# Shape, and window: size, stride, padding, dilation, ceil_mode.
WINDOWS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "the stem's": ((2, 3, 12, 9), (3, 2, 1)),
    "2x2": ((1, 5, 6, 8), (2, 2, 0)),
    "overlapping": ((1, 2, 7, 7), (3, 1, 1)),
    "with gaps": ((2, 2, 11, 10), (2, 4, 0)),
    "uneven and dilated": ((1, 3, 13, 17), ((2, 4), (3, 2), (1, 2), (3, 2))),
    "rounded up": ((2, 3, 8, 11), (3, 2, 0, 1, True)),
    "one output": ((3, 2, 2, 2), (3, 2, 1)),
    "wider than the map": ((1, 2, 1, 3), (6, 1, 3)),
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Window, dtype and layout; the interpreter is slow.
CASES = [(name, "float32", layout) for name in WINDOWS for layout in LAYOUTS]
CASES += [("the stem's", "float64", "contiguous"), ("the stem's", "bfloat16", "channels_last")]


def make(name: str, dtype: str, layout: str) -> Tensor:
    """Return a map with many equal values, a NaN and infinities."""
    shape, _ = WINDOWS[name]
    x = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).double()
    x.view(-1)[1::7] = -torch.inf
    x.view(-1)[5::31] = torch.nan
    return x.to(getattr(torch, dtype)).contiguous(memory_format=LAYOUTS[layout])


def step(x: Tensor, name: str, pool: Any) -> tuple[Tensor, Tensor]:
    """Return output and gradient of a pooling for a gradient with distinct numbers whose sums are exact."""
    leaf = x.detach().requires_grad_()
    z = pool(leaf, *WINDOWS[name][1])
    numbers = (torch.arange(z.numel(), device=x.device) % 61 - 30).to(x.dtype).view(z.shape)
    return z.detach(), torch.autograd.grad(z, leaf, numbers)[0]


def is_torchs(name: str, dtype: str, layout: str, device: str = "cpu") -> bool:
    """Return whether output and gradient are bit-identical to torch's on the CPU, in torch's layout."""
    from zoo.ops.pooling import max_pool2d

    x = make(name, dtype, layout)
    ours, theirs = step(x.to(device), name, max_pool2d), step(x, name, F.max_pool2d)
    same = [torch.equal(a.cpu().nan_to_num(7e4), b.nan_to_num(7e4)) for a, b in zip(ours, theirs, strict=True)]
    return all(same) and ours[0].dtype == x.dtype and ours[1].stride() == theirs[1].stride()


def main() -> None:
    from zoo.ops import backend, pooling, pooling_triton

    backend._chosen["cpu"] = "triton"  # the interpreter's tensors are on the CPU
    x = make("the stem's", "float32", "channels_last")
    report: dict[str, bool] = {}
    with patch.object(pooling_triton, "forward", wraps=pooling_triton.forward) as started:
        for case in CASES:
            report[" ".join(case)] = is_torchs(*case)
    assert started.call_count == len(report)
    with patch.object(pooling_triton, "TILE", 256):
        report["several programs"] = is_torchs("the stem's", "float32", "contiguous")
    report["empty"] = pooling.max_pool2d(x[:0], 3, 2, 1).shape == (0, 3, 6, 5)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
