"""The benchmark of grids finds exact reconstruction on a grid and rounding errors without one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.refusals import refused
from zoo.benchmark.grid import BFLOAT16, FLOAT, draw_errors, measure_grids
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.config.network import NetworkSpec
from zoo.engine._reconstruction import reconstruction_errors
from zoo.errors import ConfigError
from zoo.layers import ReversibleBlock, ReversibleSequential

CPU = torch.device("cpu")


class _Scale(nn.Module):
    """Multiplies by a different number in each call, so that backward cannot invert forward."""

    def __init__(self, drift: float) -> None:
        super().__init__()
        self.drift, self.calls = drift, itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.drift * next(self.calls))


def test_block_has_error_of_its_input() -> None:
    chain = ReversibleSequential([ReversibleBlock(_Scale(0.0), _Scale(drift)) for drift in (0.0, 0.1)]).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    with reconstruction_errors(nn.ModuleDict({"stage": chain})) as errors:
        chain(x).sum().backward()
    x1, x2 = (half.detach() for half in x.chunk(2, 1))
    x1, x2 = x1 + x2, x1 + 2 * x2  # the input of the second block
    y1 = x1 + x2
    # Forward added 1.1 y1, and backward subtracts 1.2 y1: x2 is off by 0.1 y1, and so is x1 = y1 - f(x2).
    off, true = torch.cat([0.1 * y1, -0.1 * y1], 1), torch.cat([x1, x2], 1)
    assert errors["stage/1"] == pytest.approx((off.norm() / true.norm()).item())
    assert chain.meter is None


def tiny(arch: str) -> Setup:
    return Setup(NetworkSpec(arch=arch), batch=4, size=8)


@pytest.mark.slow
def test_grids_reconstruct_exactly_and_finer_grids_change_logits_less(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = Results("grid", "zoo benchmark grid x", CPU, {"threads": 1})
    measure_grids(results, tiny("revnet38_cifar"), (8, 14), steps=3, rounds=1)
    found: dict[str, dict[str, float]] = {}
    for record in results.records:
        found.setdefault(record["metric"], {})[record["provider"]] = record["median"]
    for metric in ("largest relative error of reconstruction", "largest difference of weights"):
        assert found[metric]["grid 8"] == found[metric]["grid 14"] == 0 < found[metric][FLOAT]
    logits = found["logits, relative difference to float32"]
    assert 0 < logits["grid 14"] < logits["grid 8"]
    assert logits["grid 14"] < logits[BFLOAT16]
    assert all(1 < value < 100 for value in found["largest value"].values())
    assert found["held"][FLOAT] <= found["held"]["grid 14"] < found["held"][FLOAT] + 0.001  # a digest per addition
    assert found["step ratio"]["grid 14"] > 0

    errors = results.summary["errors"]["revnet38_cifar"]
    assert len(errors[FLOAT]) == 9 - 2  # nine blocks, of which two change shape and are recomputed
    assert max(errors[FLOAT]) == found["largest relative error of reconstruction"][FLOAT]
    draw_errors(tmp_path / "grid", results.content(), steps=3)
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_values_beyond_the_range_of_grid_are_noted() -> None:
    results = Results("grid", "zoo benchmark grid x", CPU, {"threads": 1})
    measure_grids(results, tiny("revnet38_cifar"), (22,), steps=1, rounds=0)
    assert "revnet38_cifar, grid 22: block" in results.notes[0]
    assert "set grid_bits to" in results.notes[0]


def test_network_without_grid_raises() -> None:
    results = Results("grid", "zoo benchmark grid x", CPU, {"threads": 1})
    refused(ConfigError, lambda: measure_grids(results, tiny("revnext"), (14,), steps=1, rounds=0), "grid_bits")
