"""The benchmark of lean networks measures bits, bytes and times, and skips networks that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.remat.programs import Branched
from zoo.benchmark import lean_networks
from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.cli import main
from zoo.config.network import NetworkSpec
from zoo.memory.allocations import count_memory
from zoo.remat import _recipes as recipes
from zoo.remat._lean import lean


def records(path: Path) -> dict[tuple[str, str, str], float]:
    content = json.loads(path.read_text())
    return {(each["subject"], each["provider"], each["metric"]): each["median"] for each in content["records"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*changes.*")
def test_network_of_zoo_and_one_of_torchvision_are_measured(tmp_path: Path) -> None:
    names = ["resnet18", "torchvision:mobilenet_v3_small"]
    others = ["torchvision:r3d_18", "torchvision:vgg11"]  # one takes videos, the other has many parameters
    command = ["benchmark", "lean", "--models", *names, *others, "--batch", "2", "--size", "64", "--max-memory", "1GB"]
    assert main([*command, "--rounds", "1", "--reports", "--threads", "1", "--out", str(tmp_path / "lean")]) == 0
    found = records(tmp_path / "lean.json")
    for name in names:
        assert 0.7 < found[name, "plain", "reported peak ratio"] < 1.1  # without scratch memory
        assert 0.7 < found[name, "lean", "reported peak ratio"] < 1.1  # without scratch memory
        assert (found[name, "lean", "trains"], found[name, "lean", "same bits"]) == (1, 1)
        assert found[name, "plain", "held ratio"] == 1
        assert found[name, "lean", "step"] > 0
    assert (
        found["torchvision:mobilenet_v3_small", "lean", "held"]
        < found["torchvision:mobilenet_v3_small", "plain", "held"]
    )
    notes = json.loads((tmp_path / "lean.json").read_text())["notes"]
    assert [note.partition(" (")[0] for note in notes[:2]] == [f"not measured: {name}" for name in others]
    assert "more than 1,000,000,000)" in notes[1]


def test_different_bits_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = recipes.compute

    def wrong(target: recipes.TrackedTensor, keeps: Callable[[recipes.TrackedTensor], bool]) -> Tensor:
        return compute(target, keeps) * 1.5

    monkeypatch.setattr(recipes, "compute", wrong)
    command = ["benchmark", "lean", "--models", "resnet18", "--batch", "2", "--size", "64", "--rounds", "0"]
    assert main([*command, "--threads", "1", "--out", str(tmp_path / "lean")]) == 0
    assert records(tmp_path / "lean.json")["resnet18", "lean", "same bits"] == 0
    notes = json.loads((tmp_path / "lean.json").read_text())["notes"]
    assert any(note.startswith("resnet18, lean: different bits (step 1, gradient of ") for note in notes)


def test_peak_of_u_net_exceeds_held_bytes_by_widest_gradients() -> None:
    """At the largest maps, recomputed tensors and gradients are alive at the same time."""
    model, images = Branched().to("meta"), torch.randn(2, 3, 64, 64, device="meta")
    plain = count_memory(lambda: model(images).square().mean(), model.parameters())
    lean(model)
    found = count_memory(lambda: model(images).square().mean(), model.parameters())
    assert found.held < 0.4 * plain.held
    assert found.peak_without_gradients < 0.65 * plain.peak_without_gradients


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "layout"), [("float32", "contiguous"), ("bfloat16", "channels_last")])
def test_budgets_are_measured_beside_checkpoints(dtype: str, layout: str) -> None:
    results = Results("lean", "", torch.device("cpu"), {})
    setup = Setup(NetworkSpec(arch="resnet18"), 4, 64, dtype=dtype, layout=layout)
    lean_networks.measure_lean_network(results, setup, rounds=1, budgets=(0.5, 0.4))
    found = {(each["provider"], each["metric"]): each["median"] for each in results.records}
    held = [found[provider, "held ratio"] for provider in ("plain", "lean, budget 0.5", "lean, budget 0.4")]
    assert sorted(held, reverse=True) == held
    assert held[1] <= 0.5
    assert found["lean, budget 0.4", "same bits"] == 1
    assert found["checkpointed blocks", "held ratio"] < 1
    assert found["checkpointed blocks", "step ratio"] > 0


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # raised by torch while it compiles
def test_inductor_is_measured_beside_lean_training() -> None:
    torch._dynamo.reset()
    results = Results("lean", "", torch.device("cpu"), {})
    setup = Setup(NetworkSpec(arch="resnet18"), 2, 64, structure=(1, 1, 1, 1))
    lean_networks.measure_lean_network(results, setup, rounds=1, compiled_budgets=(1, 0.3))
    found = {(each["provider"], each["metric"]): each["median"] for each in results.records}
    assert found["lean", "same bits"] == 1
    assert ("Inductor, lean rule", "same bits") not in found
    shares = [found[f"{name}budget 0.3", "held ratio"] for name in ("Inductor, ", "Inductor, lean rule, ")]
    assert all(share < found["Inductor, lean rule", "held ratio"] for share in shares)
    for provider in ("Inductor, lean rule", "Inductor, budget 1", "Inductor, budget 0.3"):
        assert found[provider, "step ratio"] > 0
        assert found[provider, "first step"] > 0
