"""The Triton kernel of recomputed batch norms without a GPU; tests/gpu/test_exact_norms.py compares its bits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.ops.triton_stub import interpret, stubbed
from zoo.ops.abn import triton
from zoo.ops.backend import unavailable_reason

pytestmark = [
    pytest.mark.slow,  # Triton's interpreter
    pytest.mark.skipif(unavailable_reason("triton") is not None, reason=str(unavailable_reason("triton"))),
]


def test_every_order_gives_norm_sum_and_relu() -> None:
    errors = interpret("tests.ops.normalize_cases")
    assert len(errors) == 72
    assert max(error for case, error in errors.items() if "bfloat16" not in case) < 1e-6
    assert max(errors.values()) < 0.01


@pytest.mark.parametrize("order", triton.ORDERS)
def test_compiled_norm_fuses_its_own_multiply_add_only(order, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_now, code = triton._compile, []

    def record(name, *arguments):
        kernel, accumulate = compile_now(name, *arguments)
        code.append(kernel.asm["ptx"])
        return kernel, accumulate

    x = torch.randn(2, 64, 56, 56).contiguous(memory_format=torch.channels_last)
    with stubbed(), patch.object(triton, "_compile", record):
        triton.normalize(x, x[0, :, 0, 0], x[0, :, 0, 0], x[0, :, 0, 0], x[0, :, 0, 0], order, x, True)
    (ptx,) = code
    assert "v4" in ptx
    products = ptx.count("mul.f32") + ptx.count("mul.rn.f32")
    assert (products > 0, "fma.rn.f32" in ptx) == (True, True)
    sums = ptx.count("add.f32") + ptx.count("add.rn.f32") + ptx.count("sub.f32") + ptx.count("sub.rn.f32")
    assert sums > 0
