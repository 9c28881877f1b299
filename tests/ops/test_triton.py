"""The Triton kernels without a GPU: their results in Triton's interpreter, and their code, compiled ahead of time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops import small_scales
from tests.ops.triton_cases import (
    CASES,
    FLOATS,
    LAYOUTS,
    assert_equals_the_formula,
    assert_equals_the_reference,
    lay_out,
)
from zoo.ops.abn import triton
from zoo.ops.abn.kernels import NormSettings

ROOT = Path(__file__).parents[2]
KERNELS = ["statistics", "combine_statistics", "apply", "backward_reduce", "combine_sums", "backward_apply"]
needs_triton = pytest.mark.skipif(triton.why_not() is not None, reason=str(triton.why_not()))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Return what the program of cases prints."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ops.triton_cases"]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    report: dict[str, Any] = json.loads(child.stdout)
    return report


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_autograd_of_the_formula(interpreted, name):
    assert_equals_the_formula(CASES[name], interpreted["cases"][name])


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_reference_within_a_rounding_of_their_dtype(interpreted, name):
    assert_equals_the_reference(CASES[name], interpreted["cases"][name])


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_variance_survives_a_mean_a_thousand_deviations_away(interpreted, layout):
    assert interpreted["large mean"][layout] < 1e-5


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_saturated_elu_gives_the_finite_gradients_of_the_reference(interpreted, dtype, layout):
    result = interpreted["saturated"][f"{dtype} {layout}"]
    assert result["saturated"]
    assert result["finite"]
    assert max(result["errors"]) < 2 * torch.finfo(getattr(torch, dtype)).eps + 4e-6


@needs_triton
def test_an_elu_near_zero_does_not_cancel(interpreted):
    assert interpreted["small elu"]["value"] < 1e-6
    assert interpreted["small elu"]["inverse"] < 1e-6


@needs_triton
@pytest.mark.parametrize("activation", small_scales.ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", small_scales.DTYPES)
def test_no_gradient_is_further_from_the_truth_than_it_can_be_large(interpreted, dtype, layout, activation):
    small_scales.assert_bounded(interpreted["small scales"][f"{dtype} {layout} {activation}"], dtype)


@needs_triton
def test_tensors_without_elements_give_zeros_and_empty_results(interpreted):
    assert all(interpreted["empty"])


@needs_triton
def test_torch_accepts_all_five_operators(interpreted):
    assert len(interpreted["operators"]) == 5


@needs_triton
def test_six_norms_compiled_in_one_graph_equal_eager_ones(interpreted):
    assert max(interpreted["compiled"]) < 1e-12


class Recorder:
    """Replaces a kernel: compiles what would be launched, and records the code and the tile."""

    def __init__(self, kernel: Any, record: list[tuple[str, int]]) -> None:
        self.kernel, self.record = kernel, record

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_only(*arguments: Any, **constants: Any) -> None:
            code = self.kernel.warmup(*arguments, grid=grid, **constants).asm
            assert len(code["cubin"]) > 0
            full_size = sum(isinstance(a, torch.Tensor) and a.dim() == 4 for a in arguments)
            lanes = constants["ROWS"] * constants["COLS"] // (32 * constants["num_warps"])
            bits = next(8 * a.element_size() for a in arguments if isinstance(a, torch.Tensor))
            self.record.append((code["ptx"], full_size * lanes * bits))

        return compile_only


class Device:
    """Answers what Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(request, monkeypatch, tmp_path) -> list[tuple[str, int]]:
    """Compile kernels for a device of the given capability instead of starting them; return the record of them."""
    from triton.runtime.driver import driver

    from zoo.ops.abn import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    record: list[tuple[str, int]] = []
    for name in KERNELS:
        monkeypatch.setattr(triton_kernels, name, Recorder(getattr(triton_kernels, name), record))
    monkeypatch.setattr(driver, "_active", Device(request.param))
    return record


def call_all(x: torch.Tensor) -> None:
    """Call the five kernels with all their arguments."""
    vector = torch.ones(x.shape[1])
    settings = NormSettings(vector, vector, 1e-5, "leaky_relu", 0.01)
    triton.statistics(x)
    triton.apply(x, vector, vector, settings, x)
    sums = triton.backward_reduce(x, x, settings, x)
    triton.backward_apply(x, x, vector, sums, settings, x)


def wide_bits(ptx: str) -> int:
    """Return the bits that one thread moves by accesses of 128 bits and more."""
    widths = re.findall(r"\b(?:ld|st)\.global\S*\.v(\d)\.[a-z](\d+)", ptx)
    return sum(int(count) * int(bits) for count, bits in widths if int(count) * int(bits) >= 128)


@needs_triton
@pytest.mark.parametrize("compiled", [80, 90, 100], indirect=True)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_launched_compiles_with_wide_accesses_and_without_atomics(compiled, dtype, layout):
    call_all(lay_out(torch.zeros(2, 64, 56, 56, dtype=getattr(torch, dtype)), layout))
    assert len(compiled) == len(KERNELS)
    for ptx, bits in compiled:
        assert wide_bits(ptx) >= bits
        assert not re.search(r"\b(atom|red)\.", ptx)


@needs_triton
@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_accesses_are_narrow_where_rows_are_not_aligned(compiled):
    call_all(torch.zeros(2, 64, 7, 7, dtype=torch.bfloat16))
    assert all(wide_bits(ptx) == 0 for ptx, _ in compiled)


def test_importing_the_kernels_without_triton_gives_the_reason():
    program = "import sys; sys.modules['triton'] = None\nfrom zoo.ops.abn import triton\nprint(triton.why_not())"
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout.startswith("triton is not installed: ")


@pytest.mark.parametrize("programs", [triton.REDUCING_PROGRAMS, triton.ELEMENTWISE_PROGRAMS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(32, 64, 112, 112), (32, 2048, 7, 7), (2, 64, 7, 7), (1, 3, 5, 7), (256, 96, 28, 28)]
)
def test_tilings_cover_their_tensor_with_about_the_wanted_number_of_programs(shape, layout, programs):
    x = lay_out(torch.empty(shape, dtype=torch.bfloat16), layout)
    tiling = triton.tiling_of(x, programs)
    assert tiling.outer * tiling.groups * tiling.units * tiling.unit == x.numel()
    assert tiling.rows * tiling.cols <= triton.TILE
    chunks = -(-tiling.units * tiling.unit // tiling.cols)
    assert tiling.programs * tiling.rows * tiling.cols < 4 * x.numel() + triton.TILE * shape[1]
    assert tiling.programs <= max(programs, tiling.groups * chunks)


def test_a_row_of_more_than_32_bits_is_counted_in_64():
    tiling = triton.tiling_of(torch.empty(1, 1, 2**16, 2**16, device="meta"), 1024)
    assert tiling.unit == 1
    assert tiling.units == 2**32
