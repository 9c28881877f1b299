"""``zoo show FILE`` says what is in a checkpoint or a weights file, without building anything."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

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


def test_a_file_that_says_nothing_is_shown_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(zoo.get("resnet18", num_classes=3).state_dict(), tmp_path / "bare.pth")
    facts = _shown(capsys, tmp_path / "bare.pth")
    assert facts["network"] == "not described in the file"
    assert facts["parameters"] == "11,178,051"


@pytest.mark.parametrize(
    "changes",
    [{"epoch": "3\x1b[31m"}, {"position": [1]}, {"best_prec1": torch.ones(3)}, {"torch_version": "\n" * 9999}],
)
def test_odd_values_are_shown_in_one_short_line_or_not_at_all(
    changes: dict[str, Any], finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({**read_checkpoint(finished.checkpoint), **changes}, tmp_path / "odd.pth.tar")
    assert main(["show", str(tmp_path / "odd.pth.tar")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) < 1000


def test_a_file_that_is_no_weights_file_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pth").write_text("hello")
    assert main(["show", str(tmp_path / "x.pth")]) == 2
    assert "x.pth" in capsys.readouterr().err


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


def test_a_pipe_and_a_link_to_itself_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["show", str(tmp_path / "pipe")]) == 2
    assert "it is not a regular file" in capsys.readouterr().err
    (tmp_path / "loop").symlink_to("loop")
    assert main(["show", str(tmp_path / "loop")]) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err


def test_fewer_names_than_outputs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.get("resnet18", num_classes=10)
    record = {**model.built_as.model_dump(mode="json"), "class_names": ["cat", "cow", "dog"]}
    torch.save({"state_dict": model.state_dict(), "network": record}, tmp_path / "w.pth")
    assert _shown(capsys, tmp_path / "w.pth")["classes"] == "10 outputs, 3 of them named: cat, cow, dog"
