"""``zoo show FILE`` says what is in a checkpoint or a weights file, without building anything."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

import zoo
from tests.cli.conftest import Run
from zoo.cli import main
from zoo.weights import md5_of, read_checkpoint, read_weights


def _shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    """Return the facts that the command prints, by their names."""
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:20].strip(): line[20:] for line in lines if not line.startswith(" ")}


def test_a_checkpoint_is_shown_with_its_network_its_progress_and_its_settings(
    finished: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.registry.build_network", lambda *args: pytest.fail("a network was built"))
    facts = _shown(capsys, finished.checkpoint)
    parameters = sum(p.numel() for p in read_checkpoint(finished.checkpoint)["state_dict"].values())
    assert facts["architecture"] == "resnet18"
    assert facts["norm"] == "inplace"
    assert facts["activation"] == "leaky_relu (0.01)"
    assert facts["classes"] == "2: class0, class1"
    assert facts["images"] == "shorter side 12 px, crop 10 px"
    assert facts["epochs done"] == "2"
    assert facts["steps done"] == "6"
    assert facts["best top-1"].endswith(" %")
    assert facts["torch"] == torch.__version__
    assert facts["md5"] == md5_of(finished.checkpoint)
    assert facts["sha256"] == hashlib.sha256(finished.checkpoint.read_bytes()).hexdigest()
    assert 11_000_000 < int(facts["parameters"].replace(",", "")) < parameters
    assert main(["show", str(finished.checkpoint)]) == 0
    settings = capsys.readouterr().out.partition("settings")[2]
    assert "optimizer.batch_size = 8" in settings
    assert "seed" not in settings


def test_a_converted_file_is_shown_with_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18", activation="relu", num_classes=12, dilation=[1, 1, 1, 2])
    record = {**model.built_as.model_dump(mode="json"), "class_names": [f"class{index}" for index in range(12)]}
    torch.save({"state_dict": model.state_dict(), "network": record}, tmp_path / "w.pth")
    facts = _shown(capsys, tmp_path / "w.pth")
    assert facts["activation"] == "relu"
    assert facts["options"] == "dilation=[1, 1, 1, 2]"
    assert facts["classes"].startswith("12: class0, class1, ")
    assert facts["classes"].endswith("class9 and 2 more")
    assert facts["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert "epochs done" not in facts


def test_a_checkpoint_is_shown_as_json(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished.checkpoint), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["network"] == read_weights(finished.checkpoint).spec.model_dump(mode="json")
    assert (shown["epochs_done"], shown["steps_done"], shown["moving_average"]) == (2, 6, False)
    assert 0 <= shown["best_top1"] <= 100
    assert shown["settings"]["optimizer"]["batch_size"] == 8


def test_a_log_folder_is_told_apart_and_its_files_are_named(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished.log_dir)]) == 2
    message = capsys.readouterr().err
    assert f"this is a folder; {finished.log_dir}: show a file in it" in message
    assert f"zoo show {finished.log_dir}/model_best.pth.tar" in message
    assert f"zoo show {finished.checkpoint}" in message
