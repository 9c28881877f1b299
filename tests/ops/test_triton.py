"""The Triton kernels: tiles, compiled code and launches; test_back_ends.py has their results."""

from __future__ import annotations

import math
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.ops.back_ends import needs
from tests.ops.norm_cases import LAYOUTS, lay_out
from tests.ops.triton_stub import Operations, compiled_code, stubbed
from zoo.layers import InPlaceABN, InPlaceABNSync
from zoo.ops.abn import triton

pytestmark = pytest.mark.slow  # Triton's interpreter
KERNELS = ["statistics", "combine_statistics", "apply", "backward_reduce", "combine_sums", "backward_apply"]
#: Loads or stores of 128 bits: four values of 32, or two of 64.
WIDE = r"\b(ld|st)\.global\S*\.(v4\.[a-z]32|v2\.[a-z]64)"


SHAPES = [(32, 64, 112, 112), (32, 2048, 7, 7), (2, 64, 7, 7), (1, 3, 5, 7), (256, 96, 28, 28), (64, 1024, 14, 14)]
SHAPES += [(256, 256, 56, 56), (256, 1024, 14, 14), (256, 512, 7, 7), (8, 2048, 7, 7)]


@pytest.mark.parametrize("reducing", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_programs_are_resident_or_fill_waves(shape, layout, reducing):
    tiling = triton.tiling_of(lay_out(torch.empty(shape, dtype=torch.bfloat16, device="meta"), layout), reducing)
    assert tiling.outer * tiling.groups * tiling.units * tiling.unit == math.prod(shape)
    assert tiling.rows * tiling.cols <= triton.TILE
    for places in (108 * 7, 132 * 6, 132 * 12, 148 * 16):
        pieces, programs = triton.split(tiling, places)
        assert programs == pieces * tiling.strips
        steps, waves = -(-tiling.tiles // pieces), -(-programs // places)
        assert waves == 1 or tiling.strips > places
        enough = tiling.tiles * tiling.strips > 8 * places  # enough tiles for an even distribution
        assert tiling.tiles * tiling.strips > (0.8 if waves > 1 else 0.5) * steps * waves * places or not enough


@pytest.mark.parametrize("shape", SHAPES)
def test_indivisible_planes_are_read_in_rows_of_channels(shape):
    planes, few = math.prod(shape[2:]), shape[0] * 2 < 24
    for reducing in (True, False):
        tiling = triton.tiling_of(torch.empty(shape, dtype=torch.bfloat16, device="meta"), reducing)
        widened = planes % 8 != 0 and shape[1] * planes % 8 == 0 and not (reducing and few)
        assert tiling.period == (planes if widened else 0)
        assert tiling.unit % 8 == 0 or not widened


def test_row_of_more_than_32_bits_is_counted_in_64():
    tiling = triton.tiling_of(torch.empty(1, 1, 2**16, 2**16, device="meta"))
    assert tiling.unit == 1
    assert tiling.units == 2**32


def test_last_tile_of_row_does_not_end_beyond_32_bits_either():
    for inner in (2**31 - 1024, 2**31 - 512, 2**31 - 16):
        tiling = triton.tiling_of(torch.empty(1, 1, inner, device="meta"))
        assert tiling.unit == 1 or -(-inner // tiling.cols) * tiling.cols <= 2**31 - 1
        assert tiling.units * tiling.unit == inner


@pytest.mark.parametrize("slices", [lambda x: x[:, 2:6], lambda x: x[..., ::2]])
def test_part_of_channels_last_tensor_is_copied_in_its_layout(slices):
    part = slices(lay_out(torch.randn(2, 8, 6, 6), "channels_last"))
    dense = triton._dense(part)
    assert torch.equal(dense, part)
    assert dense.is_contiguous(memory_format=torch.channels_last)


def launches(layer: torch.nn.Module, dtype: torch.dtype, shortcut: bool = False) -> list[str]:
    """Return the kernels and operations of torch that forward and backward of a norm launch on the device."""
    x = torch.randn(2, 64, 14, 14, dtype=dtype, requires_grad=True)
    arguments = (x, torch.randn_like(x).requires_grad_()) if shortcut else (x,)
    dz = torch.randn_like(x)
    layer.inplace = False
    with stubbed() as device, Operations() as operations:
        torch.autograd.grad(layer(*arguments), [*arguments, *layer.parameters()], dz)
    return [*device.started, *operations.launched.elements()]


@needs("triton")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("shape", "layout"), [*(((2, 64, 56, 56), each) for each in LAYOUTS), ((16, 64, 7, 7), "contiguous")]
)
def test_kernels_compile_without_atomics_and_access_128_bits_at_once(shape, layout, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_now, code = triton._compile, {}

    def record(name: str, *arguments: Any) -> tuple[Any, Any]:
        kernel, accumulate = compile_now(name, *arguments)
        code[name] = kernel.asm
        return kernel, accumulate

    x = lay_out(torch.randn(shape, dtype=torch.bfloat16), layout).requires_grad_()
    layer = InPlaceABN(64)
    layer.inplace = False
    with stubbed(capability), patch.object(triton, "_compile", record):
        layer(x).backward(lay_out(torch.randn_like(x), layout))
    assert sorted(code) == sorted(KERNELS)
    for name, each in code.items():
        assert len(each["cubin"]) > 0
        assert not re.search(r"\b(atom|red)\.", each["ptx"])
        assert "combine" in name or re.search(WIDE, each["ptx"])


@needs("triton")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooling_compiles_without_atomics(layout, dtype, capability, monkeypatch, tmp_path):
    from zoo.ops import pooling_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, z = (lay_out(torch.zeros(2, 64, side, side, dtype=dtype), layout) for side in (56, 28))
    place, window = z.to(torch.uint8), ((3, 3), (2, 2), (1, 1), (1, 1))
    with compiled_code(pooling_triton, "maxima", "gradient", capability=capability) as code:
        pooling_triton.forward(z, place, x, *window)
        pooling_triton.backward(x, z, place, *window)
    assert len(code) == 2
    for ptx in code:
        assert not re.search(r"\b(atom|red)\.", ptx)
        assert layout == "contiguous" or re.search(WIDE, ptx)


@needs("triton")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_sum_on_grid_compiles_and_reads_128_bits_at_once(capability, monkeypatch, tmp_path):
    from zoo.ops import grid_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.zeros(2, 64, 56, 56)
    with compiled_code(grid_triton, "sum_kernel", capability=capability) as code:
        for subtracts in (False, True):
            grid_triton.sum_into(x, torch.zeros(2, dtype=torch.int32), x, x, 2.0**14, subtracts)
    assert len(code) == 2
    assert all("v4" in ptx for ptx in code)


def test_blocks_per_multiprocessor_match_occupancy_calculator():
    limits = triton.MultiprocessorLimits(registers=65536, shared_bytes=233472, threads=2048)  # limits of an H100
    found = {used: triton.resident_blocks(used, 512, 4, limits) for used in (32, 64, 72, 80, 96, 168, 255)}
    assert found == {32: 16, 64: 8, 72: 7, 80: 6, 96: 5, 168: 3, 255: 2}
    assert triton.resident_blocks(32, 2**16, 4, limits) == 3


@needs("triton")
@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_training_step_of_norm_is_six_kernels_and_count_of_batches(dtype, parameters, shortcut):
    started = launches(InPlaceABN(64, dtype=getattr(torch, parameters)), getattr(torch, dtype), shortcut)
    assert started == [*KERNELS, "add_"]


@needs("triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synchronized_norm_launches_at_most_four_more_operations(dtype):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        started = launches(InPlaceABNSync(64), dtype)
    finally:
        torch.distributed.destroy_process_group()
    more = ["combine_statistics", "_allgather_base_", "allreduce_", "div"]
    assert sorted(started) == sorted([*KERNELS, "add_", *more])


@needs("triton")
@pytest.mark.parametrize("shortcut", [False, True])
def test_gradient_in_another_layout_is_copied_once(shortcut):
    x, joined = torch.randn(2, 64, 14, 14, requires_grad=True), torch.randn(2, 80, 14, 14)
    layer = InPlaceABN(64)
    layer.inplace = False
    with stubbed(), Operations() as operations:
        out = layer(x, lay_out(torch.randn(x.shape), "channels_last") if shortcut else None)
        operations.launched.clear()
        torch.autograd.grad(out, x, joined[:, 16:])
    assert operations.launched == {"copy_": 2 if shortcut else 1}
