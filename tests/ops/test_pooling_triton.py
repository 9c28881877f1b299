"""The Triton kernels of maximum pooling without a GPU: their bits in Triton's interpreter, and their compiled code."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ops.pooling_cases import CASES, LAYOUTS
from tests.ops.triton_stub import Compiler, Device, interpret
from zoo.ops.backend import unavailable_reason

pytestmark = [
    pytest.mark.slow,  # Triton's interpreter
    pytest.mark.skipif(unavailable_reason("triton") is not None, reason=str(unavailable_reason("triton"))),
]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    return interpret("tests.ops.pooling_cases")


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_outputs_and_gradients_are_bit_identical_to_torch(interpreted, case):
    assert interpreted[" ".join(case)]


def test_several_programs_and_none_give_the_same(interpreted):
    assert interpreted["several programs"]
    assert interpreted["empty"]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_compile_without_atomics(capability, dtype, layout, monkeypatch, tmp_path):
    from triton.runtime.driver import driver

    from zoo.ops import pooling_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Device(capability))
    record: list[str] = []
    for name in ("maxima", "gradient"):
        monkeypatch.setattr(pooling_triton, name, Compiler(getattr(pooling_triton, name), record))
    x = torch.zeros(2, 64, 56, 56, dtype=getattr(torch, dtype)).contiguous(memory_format=LAYOUTS[layout])
    z = torch.zeros(2, 64, 28, 28, dtype=x.dtype).contiguous(memory_format=LAYOUTS[layout])
    window = (3, 3), (2, 2), (1, 1), (1, 1)
    pooling_triton.forward(z, z.to(torch.uint8), x, *window)
    pooling_triton.backward(x, z, z.to(torch.uint8), *window)
    assert len(record) == 2
    for ptx in record:
        assert not re.search(r"\b(atom|red)\.", ptx)
        # Loads or stores of 128 bits: four values of 32, or two of 64.
        assert layout == "contiguous" or re.search(r"\b(ld|st)\.global\S*\.(v4\.[a-z]32|v2\.[a-z]64)", ptx)
