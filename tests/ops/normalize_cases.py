"""Prints as JSON the errors of `zoo.ops.abn.triton.normalize` in Triton's interpreter.

tests/ops/abn/test_normalize.py runs it with TRITON_INTERPRET=1, which has to be set before Triton is imported.
"""

from __future__ import annotations

import itertools
import json

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.formula import relative_error
from tests.ops.norm_cases import LAYOUTS, lay_out
from zoo.ops.abn.triton import ORDERS, normalize

SHAPES = [(3, 24, 5, 7), (2, 8, 16, 16), (5, 12)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def error(shape: tuple[int, ...], layout: str, dtype: torch.dtype, order: str, is_full: bool) -> float:
    """Return the relative error of a norm; ``is_full``: with weight and bias, and followed by a sum and ReLU."""
    torch.manual_seed(0)

    def random() -> Tensor:
        x = torch.randn(shape, dtype=dtype)
        return lay_out(x, layout) if x.ndim == 4 else x

    x, shortcut = random(), random() if is_full else None
    weight, bias = torch.randn(2, shape[1]) if is_full else (None, None)
    var, mean = torch.var_mean(x.float(), [0, *range(2, x.ndim)], correction=0)
    found = normalize(x, weight, bias, mean, (var + 1e-5).rsqrt(), order, shortcut, is_full)
    parameters = [None if each is None else each.double() for each in (mean, var, weight, bias)]
    expected = F.batch_norm(x.double(), *parameters, eps=1e-5)
    if shortcut is not None:
        expected = (expected.to(dtype).double() + shortcut.double()).relu()
    assert found.dtype == dtype
    assert found.stride() == x.stride()
    return relative_error(found.double(), expected)


if __name__ == "__main__":
    cases = itertools.product(SHAPES, LAYOUTS, DTYPES, ORDERS, [False, True])
    print(json.dumps({str(case): error(*case[:2], DTYPES[case[2]], *case[3:]) for case in cases}))
