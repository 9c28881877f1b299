"""The benchmark of lean networks tells bits, bytes and times, and survives networks that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from zoo.cli import main
from zoo.ops.lean import recipes


def records(path: Path) -> dict[tuple[str, str, str], float]:
    content = json.loads(path.read_text())
    return {(each["subject"], each["provider"], each["metric"]): each["median"] for each in content["records"]}


@pytest.mark.filterwarnings("ignore:.*changes.*")
def test_a_network_of_zoo_and_one_of_torchvision_are_measured(tmp_path: Path) -> None:
    names = ["resnet18", "torchvision:mobilenet_v3_small"]
    command = ["benchmark", "lean", "--models", *names, "torchvision:inception_v3", "--batch", "2", "--size", "64"]
    assert main([*command, "--rounds", "1", "--threads", "1", "--out", str(tmp_path / "lean")]) == 0
    found = records(tmp_path / "lean.json")
    for name in names:
        assert (found[name, "lean", "trains"], found[name, "lean", "same bits"]) == (1, 1)
        assert found[name, "plain", "held ratio"] == 1
        assert found[name, "lean", "step"] > 0
    assert (
        found["torchvision:mobilenet_v3_small", "lean", "held"]
        < found["torchvision:mobilenet_v3_small", "plain", "held"]
    )
    # images of 64 px are too small for it
    assert any(
        note.startswith("not measured: torchvision:inception_v3")
        for note in json.loads((tmp_path / "lean.json").read_text())["notes"]
    )


def test_other_bits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = recipes.compute

    def wrong(value: recipes.Value) -> Tensor:
        return compute(value) * 1.5

    monkeypatch.setattr(recipes, "compute", wrong)
    command = ["benchmark", "lean", "--models", "resnet18", "--batch", "2", "--size", "64", "--rounds", "0"]
    assert main([*command, "--threads", "1", "--out", str(tmp_path / "lean")]) == 0
    assert records(tmp_path / "lean.json")["resnet18", "lean", "same bits"] == 0
    notes = json.loads((tmp_path / "lean.json").read_text())["notes"]
    assert "resnet18: other bits; plain training repeats its own" in notes


def test_an_error_without_words_is_told_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(value: recipes.Value) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(recipes, "compute", fail)
    command = ["benchmark", "lean", "--models", "resnet18", "--batch", "2", "--size", "64", "--rounds", "0"]
    assert main([*command, "--threads", "1", "--out", str(tmp_path / "lean")]) == 0
    assert records(tmp_path / "lean.json")["resnet18", "lean", "trains"] == 0
    assert "resnet18 fails: AssertionError" in json.loads((tmp_path / "lean.json").read_text())["notes"]
