"""The Triton kernels as they are compiled for GPUs of three generations: what their code has to be like to be fast."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.ops import compiled_kernels
from tests.ops.compiled_kernels import Kernel, compile_kernels
from tests.ops.triton_cases import FLOATS, LAYOUTS, lay_out
from tests.ops.triton_stub import stubbed
from zoo.ops.abn import triton
from zoo.ops.abn.kernels import NormSettings

UNAVAILABLE = compiled_kernels.unavailable_reason()
pytestmark = [
    pytest.mark.slow,  # compiles Triton kernels
    pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE)),
]


class Gpu(NamedTuple):
    """Multiprocessors of a GPU and their capacity, from its data sheet."""

    processors: int
    limits: triton.MultiprocessorLimits


# By compute capability: A100, H200 and B200.
GENERATIONS = {
    80: Gpu(108, triton.MultiprocessorLimits(65536, 167936, 2048)),
    90: Gpu(132, triton.MultiprocessorLimits(65536, 233472, 2048)),
    100: Gpu(148, triton.MultiprocessorLimits(65536, 233472, 2048)),
}
# Bytes in flight per multiprocessor that saturate the memory bandwidth of an H200 at a latency of 0.7 us.
BYTES_IN_FLIGHT = 4.3e12 / 132 * 0.7e-6
MOST_ELU_INSTRUCTIONS = 25
# (what, shape): planes that vectors divide, and two kinds that they do not.
SHAPES = {"56x56": (256, 64, 56, 56), "14x14": (256, 256, 14, 14), "7x7": (256, 512, 7, 7)}
KINDS = [("56x56", "channels_last"), *((name, "contiguous") for name in SHAPES)]


def like(name: str, dtype: str, layout: str) -> Tensor:
    """Return a tensor of no memory."""
    x = torch.empty(SHAPES[name], dtype=getattr(torch, dtype), device="meta")
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x


def assert_fast(kernels: dict[str, Kernel], capability: int, item_bytes: int) -> None:
    """Check access width, spills, that enough bytes are on their way, and that there is one wave or full ones."""
    gpu = GENERATIONS[capability]
    for name, kernel in kernels.items():
        code, tiling = kernel.code, kernel.tiling
        assert code.access_bits >= 128, name
        # For float64 the assembler may spill a word that is read once per tile, to fit one block more. For sm_80,
        # Triton 3.6, which belongs to torch 2.11, does so for all types.
        may_spill = item_bytes == 8 or (capability == 80 and version("triton").startswith("3.6."))
        assert code.spilled_bytes <= (8 if may_spill else 0), name
        assert code.atomics == 0, name
        blocks = code.blocks(gpu.limits)
        tile_bytes = tiling.rows * tiling.cols * item_bytes * kernel.loads
        assert blocks * tile_bytes > BYTES_IN_FLIGHT, (name, code)
        places = gpu.processors * blocks
        pieces, programs = triton.split(tiling, places)
        steps = -(-programs // places) * -(-tiling.tiles // pieces)  # of the busiest place
        assert programs <= places or tiling.strips * tiling.tiles > 0.8 * steps * places, name


def check(kind: tuple[str, str], dtype: str, activation: str, shortcut: bool, capability: int) -> None:
    x = like(kind[0], dtype, kind[1])
    kernels = dict(compile_kernels(x, activation, shortcut, capability))
    assert_fast(kernels, capability, x.element_size())
    if activation == "elu" and not shortcut and dtype != "float64":
        most = {name: kernel.code.instructions for name, kernel in kernels.items()}
        assert max(most.values()) <= MOST_ELU_INSTRUCTIONS, most


@pytest.mark.parametrize(
    ("kind", "activation", "capability"),
    [
        (KINDS[0], "elu", 80),
        (KINDS[0], "elu", 100),
        (("7x7", "contiguous"), "leaky_relu", 90),
        (("14x14", "contiguous"), "leaky_relu", 90),
    ],
)
def test_code_for_half_precision_is_wide_and_leaves_room_for_enough_blocks(kind, activation, capability):
    check(kind, "bfloat16", activation, False, capability)


@pytest.mark.exhaustive  # 600 kernels, 10 minutes
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["float64", *FLOATS])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_all_code_is_wide_and_leaves_room_for_enough_blocks(kind, dtype, capability):
    for activation, shortcut in (("leaky_relu", False), ("leaky_relu", True), ("identity", False), ("elu", False)):
        check(kind, dtype, activation, shortcut, capability)


def test_accesses_are_narrow_where_no_row_is_aligned():
    x = torch.empty(256, 3, 7, 7, dtype=torch.bfloat16, device="meta")
    assert {kernel.code.access_bits for kernel in compile_kernels(x).values()} == {16}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_these_are_the_kernels_that_a_norm_starts(layout):
    """What is compiled ahead of time has the arguments of what is compiled for real tensors."""
    x = lay_out(torch.zeros(32, 8, 7, 7, dtype=torch.bfloat16), layout)
    vector = torch.ones(8)
    settings = NormSettings(vector, vector, 1e-5, "leaky_relu", 0.01)
    started, ahead = [], []
    compile_now = triton._compile

    def record_start(name: str, x: Tensor, warps: int, tensors: Any, numbers: Any) -> Any:
        started.append((name, tuple(map(compiled_kernels._type_of, (*tensors, *numbers))), numbers))
        return compile_now(name, x, warps, tensors, numbers)

    def record_ahead(name: str, types: Any, numbers: Any, *_: Any) -> Any:
        ahead.append((name, types, numbers))
        return b"", 0

    with stubbed(), patch.object(triton, "_compile", record_start):
        mean, var = triton.statistics(x)
        triton.apply(x, mean, var, settings, x)
        triton.backward_reduce(x, x, settings, x)
        triton.backward_apply(x, x, var, (mean, var), settings, x)
    with patch.object(compiled_kernels, "_compile", record_ahead), patch.object(compiled_kernels, "_read"):
        compile_kernels(x, "leaky_relu", shortcut=True)
    assert [call for call in started if not call[0].startswith("combine")] == ahead


def test_blocks_per_processor_are_those_of_the_occupancy_calculator():
    limits = GENERATIONS[90].limits
    found = {
        registers: triton.resident_blocks(registers, 512, 4, limits) for registers in (32, 64, 72, 80, 96, 168, 255)
    }
    assert found == {32: 16, 64: 8, 72: 7, 80: 6, 96: 5, 168: 3, 255: 2}
    assert triton.resident_blocks(32, 2**16, 4, limits) == 3
