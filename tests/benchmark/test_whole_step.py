"""The benchmark of whole steps: releasing gradients is bit-identical and lowers the peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.libraries import Example, forward_of
from tests.refusals import refused
from zoo.benchmark.results import Case, Results
from zoo.benchmark.whole_step import LEAN, PLAIN, RELEASED, measure_step
from zoo.cli import main
from zoo.errors import ConfigError


def _results(rounds: int = 0, optimizer: str = "SGD", device: str = "cpu") -> dict[tuple[str, str], float]:
    results = Results("step", "zoo benchmark step", torch.device(device), {})
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        example = Example(model, (torch.ones(2, 64),), lambda output: output.sum())
    measure_step(
        results, Case("linear", (), "float32", ""), model, lambda each: forward_of(example, each),
        optimizer=optimizer, rounds=rounds,
    )  # fmt: skip
    return {(each["provider"], each["metric"]): each["median"] for each in results.records}


def test_released_gradients_lower_the_peak():
    found = _results(rounds=1)
    of_layer = 64 * 65 * 4 / 1e6
    assert found[PLAIN, "gradients"] == pytest.approx(12 * of_layer)
    assert found[PLAIN, "parameters and states"] == pytest.approx(24 * of_layer)
    assert found[LEAN, "gradients, share of the peak"] > 0.8
    assert found[RELEASED, "saved, share of the gradients"] > 0.7
    assert found[RELEASED, "same bits"] == found[LEAN, "same bits"] == 1
    assert found[RELEASED, "time of the release"] > 0


def test_steps_are_counted_on_the_meta_device():
    found = _results(optimizer="AdamW", device="meta")
    assert found[RELEASED, "saved, share of the gradients"] > 0.6
    assert (RELEASED, "same bits") not in found


def test_optimizer_that_updates_all_at_once_is_refused():
    refused(ConfigError, lambda: _results(optimizer="LBFGS"), "LBFGS")


@pytest.mark.slow
def test_command_counts_shapes_and_refuses_others(tmp_path, capsys):
    command = f"benchmark step --models revnet38_cifar --shapes --counted 2x8 --out {tmp_path / 'step'}"
    assert main(command.split()) == 0
    assert "saved, share of the gradients" in (tmp_path / "step.md").read_text()
    with pytest.raises(SystemExit):
        main(command.replace("2x8", "32").split())
    assert "'32' is not NxPX" in capsys.readouterr().err
