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
from zoo.cli.show import INDENT
from zoo.weights import md5_of, read_checkpoint, read_weights


def _shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    """Return the facts that the command prints, by their names."""
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:INDENT].strip(): line[INDENT:] for line in lines if line[:INDENT].strip()}


def test_a_checkpoint_is_shown_with_its_network_its_progress_and_its_settings(
    finished: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.registry.build_network", lambda *args: pytest.fail("a network was built"))
    facts = _shown(capsys, finished.checkpoint)
    parameters = sum(p.numel() for p in read_checkpoint(finished.checkpoint)["state_dict"].values())
    assert (facts["arch"], facts["norm"], facts["class_names"]) == ("resnet18", "inplace", "['class0', 'class1']")
    assert (facts["epochs_done"], facts["steps_done"], facts["torch"]) == ("2", "6", torch.__version__)
    assert facts["md5"] == md5_of(finished.checkpoint)
    assert facts["sha256"] == hashlib.sha256(finished.checkpoint.read_bytes()).hexdigest()
    assert 11_000_000 < int(facts["parameters"].replace(",", "")) < parameters
    assert facts["batch_size"] == "8"


def test_a_file_that_says_nothing_is_shown_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(zoo.get("resnet18", num_classes=3).state_dict(), tmp_path / "bare.pth")
    facts = _shown(capsys, tmp_path / "bare.pth")
    assert "network:" not in facts
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
    assert 0 <= shown["best_score"] <= 100
    assert shown["settings"]["optimizer"]["batch_size"] == 8


def test_a_log_folder_is_told_apart(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished.log_dir)]) == 2
    assert f"this is a folder; {finished.log_dir}: give a file in it" in capsys.readouterr().err


def test_a_pipe_and_a_link_to_itself_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["show", str(tmp_path / "pipe")]) == 2
    assert "it is not a regular file" in capsys.readouterr().err
    (tmp_path / "loop").symlink_to("loop")
    assert main(["show", str(tmp_path / "loop")]) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err
