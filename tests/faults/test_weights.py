"""Hostile and malformed weights files are refused cheaply with one clear error, or read correctly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.refusals import refused
from zoo.cli import main
from zoo.errors import WeightsError
from zoo.weights import read_weights


def test_path_with_null_byte_raises() -> None:
    refused(WeightsError, lambda: zoo.get("resnet18", weights="a\0b"), r"a\x00b")


def lying_files() -> dict[str, Any]:
    """Checkpoints with the tensors of a small network, beside a claim that they belong to one of 3,000 blocks."""
    small = zoo.get("resnet32_cifar")
    own = small.built_as.model_dump(mode="json")
    lie = {"arch": "irevnet_cifar", "options": {"blocks": [1000] * 3}}
    config = {"network": {**lie, "classes": 10, "activation": "leaky_relu"}}
    state_dict = small.state_dict()
    return {
        "record": {"state_dict": state_dict, "network": {**own, **lie}},
        "both": {"state_dict": state_dict, "network": {**own, **lie}, "config": config, "format_version": 1},
        "config beside an honest record": {
            "state_dict": state_dict,
            "network": own,
            "config": config,
            "format_version": 1,
        },
        "sizes": {
            "state_dict": state_dict,
            "network": {**own, "arch": "revnext_flat", "options": {"channels": 512}},
        },
    }


@pytest.mark.parametrize("kind", ["record", "both", "config beside an honest record", "sizes"])
def test_false_claim_of_large_network_raises_before_building(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.pth"
    torch.save(lying_files()[kind], path)

    def must_not_run(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a network was built")

    monkeypatch.setattr("zoo.registry.get._build", must_not_run)
    monkeypatch.setattr(torch.nn.Module, "to_empty", must_not_run)
    start = time.monotonic()
    refused(WeightsError, lambda: zoo.get(path), "w.pth")
    for command in (["validate", str(path), str(tmp_path)], ["convert", "export", str(path), str(tmp_path / "t.pth")]):
        assert main(command) == 2
        assert "w.pth: " in capsys.readouterr().err
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("network", [{"type": "resnet", "depth": 50}, [1], "resnet50", {}])
def test_network_key_of_another_trainer_is_not_record(network: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "network": network}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").spec is None


def test_scalar_classifier_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18", num_classes=2)
    state_dict = {**model.state_dict(), "classifier.fc.weight": torch.tensor(1.0)}
    torch.save({"state_dict": state_dict, "network": model.built_as.model_dump(mode="json")}, tmp_path / "w.pth")
    refused(WeightsError, lambda: zoo.get(tmp_path / "w.pth"), "w.pth: ", "classifier.fc.weight")
    inplace = model.built_as.changed(norm="inplace")
    refused(WeightsError, lambda: zoo.convert.inplace_to_standard(state_dict, inplace), "classifier.fc.weight")
    torch.save(state_dict, tmp_path / "bare.pth")
    command = ["convert", "export", str(tmp_path / "bare.pth"), str(tmp_path / "t.pth"), "--arch", "resnet18"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "bare.pth" in message
    assert "classifier.fc.weight" in message


@pytest.mark.parametrize(
    "options",
    [
        {"channels": 4096},
        {"channels": 4096, "layers": [1] * 8, "pools": ["channel"] * 7},  # the largest that the options allow
        {"layers": [1000] * 8, "pools": ["batch"] * 7},
        {"layers": "many"},
        {"layers": [10**4] * 3},
    ],
)
def test_record_of_impossible_sizes_raises_with_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.get("revnext_flat")
    record = {**model.built_as.model_dump(mode="json"), "options": options}
    torch.save({"state_dict": model.state_dict(), "network": record}, tmp_path / "w.pth")
    refused(WeightsError, lambda: zoo.get(tmp_path / "w.pth"), "w.pth: ")
