"""What norms should take on a GPU: the model by hand, and the command, which says that nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zoo.benchmark import compiled_kernels
from zoo.benchmark.compiled_kernels import Code, Kernel
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.norm_prediction import GPUS, combination_seconds, kernel_seconds, norms_of
from zoo.cli import benchmark, main
from zoo.ops.abn import triton

H200 = GPUS["H200"]
FULL = Code(registers=32, shared_bytes=0, spilled_bytes=0, access_bits=128, instructions=8, atomics=0)


def kernel(code: Code, shape: tuple[int, ...] = (256, 64, 112, 112)) -> Kernel:
    """Return a kernel that reads and writes a channels_last tensor."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta").contiguous(memory_format=torch.channels_last)
    return Kernel(triton.tiling_of(x), loads=1, stores=1, planes=0, code=code)


def test_a_kernel_of_many_blocks_takes_the_time_of_a_copy():
    copied = 2 * 2 * 256 * 64 * 112 * 112 / H200.copy_rate
    assert copied <= kernel_seconds(kernel(FULL), 2, H200) < 1.02 * copied


def test_few_blocks_wait_for_memory_and_many_instructions_for_the_processor():
    fast = kernel_seconds(kernel(FULL), 2, H200)
    assert kernel_seconds(kernel(FULL._replace(registers=255)), 2, H200) > 1.2 * fast
    instructions = 2 * 31  # twice as many as a processor can issue in the time of a copy
    assert kernel_seconds(kernel(FULL._replace(instructions=instructions)), 2, H200) == pytest.approx(2 * fast, rel=0.1)


def test_reductions_alone_have_something_to_combine():
    assert combination_seconds(kernel(FULL), H200) == 0
    assert combination_seconds(kernel(FULL)._replace(planes=3), H200) > 4.5e-6


def test_the_norms_of_a_network_are_found_with_their_inputs():
    norms = norms_of(Setup("resnet18", 4, 64, device=torch.device("meta")))
    assert len(norms) == 17 + 3
    assert {norm.shape[0] for norm in norms} == {4}
    assert (4, 64, 32, 32) in {norm.shape for norm in norms}


def test_the_command_line_knows_these_gpus():
    assert set(benchmark.GPUS) == set(GPUS)


@pytest.mark.skipif(compiled_kernels.why_not() is not None, reason=str(compiled_kernels.why_not()))
def test_the_command_prints_a_row_per_kind_of_norm_and_says_that_it_predicts(tmp_path: Path, capsys) -> None:
    command = ["benchmark", "predict", "resnet18", "--batch", "8", "--size", "64", "--layout", "channels_last"]
    assert main([*command, "--structure", "1x1x1x1", "--dtype", "bfloat16", "--out", str(tmp_path / "p")]) == 0
    shown = capsys.readouterr().out
    assert "predicted, not measured" in shown
    content = json.loads((tmp_path / "p.json").read_text())
    assert {record["provider"] for record in content["records"]} == {"predicted for H200"}
    assert any(note.startswith("predicted, not measured") for note in content["notes"])
    layers = sum(r["median"] for r in content["records"] if r["metric"] == "layers")
    (launches,) = (r["median"] for r in content["records"] if r["metric"] == "launches" and "all" in r["subject"])
    assert launches == 7 * layers
    shares = [r["median"] for r in content["records"] if r["unit"].startswith("%")]
    assert all(0 < share <= 100.5 for share in shares)
