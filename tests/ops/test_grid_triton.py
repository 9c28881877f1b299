"""The Triton kernel of sums on the grid without a GPU: its values in Triton's interpreter, and its compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.grid_cases import CASES
from tests.ops.triton_stub import Compiler, Device, interpret
from zoo.ops.backend import unavailable_reason

pytestmark = [
    pytest.mark.slow,  # Triton's interpreter
    pytest.mark.skipif(unavailable_reason("triton") is not None, reason=str(unavailable_reason("triton"))),
]


def test_kernel_is_bit_identical_to_separate_operations() -> None:
    assert interpret("tests.ops.grid_cases") == dict.fromkeys(CASES, True)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernel_compiles_and_reads_128_bits_at_once(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from triton.runtime.driver import driver

    from zoo.ops import grid_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Device(capability))
    record: list[str] = []
    monkeypatch.setattr(grid_triton, "sum_kernel", Compiler(grid_triton.sum_kernel, record))
    x = torch.zeros(2, 64, 56, 56)
    for subtracts in (False, True):
        grid_triton.sum_into(x, torch.zeros(2, dtype=torch.int32), x, x, 2.0**14, subtracts)
    assert len(record) == 2
    assert all("v4" in ptx for ptx in record)
