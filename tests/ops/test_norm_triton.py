"""The Triton kernel of a recomputed norm without a GPU: its values in Triton's interpreter, and its compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.norm_cases import CASES, LAYOUTS
from tests.ops.triton_stub import Compiler, Device, interpret
from zoo.ops.abn import triton

pytestmark = [
    pytest.mark.slow,  # Triton's interpreter
    pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason())),
]
FUSED = (1, 3, 5, 6)  # orders with a fused multiply-add, which the interpreter rounds twice


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    return interpret("tests.ops.norm_cases")


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_pass_has_the_bits_of_the_separate_operations(interpreted: dict[str, float], case: Any) -> None:
    error = interpreted[" ".join(map(str, case))]
    if case[3] in FUSED:
        assert error < (1e-5 if case[1] == "float32" else 0.01)
    else:
        assert error == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("order", [2, 3])
def test_multiplications_and_additions_are_fused_only_where_the_order_says_so(
    capability: int, order: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from triton.runtime.driver import driver

    from zoo.ops import norm_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Device(capability))
    record: list[str] = []
    monkeypatch.setattr(norm_triton, "normalize_add_relu", Compiler(norm_triton.normalize_add_relu, record))
    for layout in LAYOUTS.values():
        x = torch.zeros(2, 64, 56, 56).contiguous(memory_format=layout)
        norm_triton.normalize(x, *torch.zeros(4, 64), order, x, True)
    assert len(record) == 2
    for ptx in record:
        assert ("fma.rn" in ptx) == (order in FUSED)
        assert "v4" in ptx  # 128 bits at once
