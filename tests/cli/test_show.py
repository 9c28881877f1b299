"""``zoo show FILE`` describes a checkpoint or a weights file without building a network."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from zoo.cli import main
from zoo.cli.show import INDENT
from zoo.weights import md5_of, read_checkpoint, read_weights


def _shown(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    """Return the facts that the command prints, by their names."""
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:INDENT].strip(): line[INDENT:] for line in lines if line[:INDENT].strip()}


def test_checkpoint_is_shown_with_network_progress_and_settings(
    finished: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.registry.get.build_network", lambda *args: pytest.fail("a network was built"))
    facts = _shown(capsys, finished.checkpoint)
    parameters = sum(p.numel() for p in read_checkpoint(finished.checkpoint)["state_dict"].values())
    assert (facts["arch"], facts["norm"], facts["class_names"]) == ("resnet32_cifar", "inplace", "['class0', 'class1']")
    assert (facts["epochs_done"], facts["steps_done"], facts["torch"]) == ("2", "6", torch.__version__)
    assert facts["md5"] == md5_of(finished.checkpoint)
    assert facts["sha256"] == hashlib.sha256(finished.checkpoint.read_bytes()).hexdigest()
    assert 463_000 < int(facts["parameters"].replace(",", "")) < parameters
    assert facts["batch_size"] == "8"


def test_checkpoint_is_shown_as_json(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished.checkpoint), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["network"] == read_weights(finished.checkpoint).spec.model_dump(mode="json")
    assert (shown["epochs_done"], shown["steps_done"], shown["moving_average"]) == (2, 6, False)
    assert 0 <= shown["best_score"] <= 100
    assert shown["settings"]["optimizer"]["batch_size"] == 8


def test_log_folder_fails(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(finished.log_dir)]) == 2
    assert f"{finished.log_dir}: this is a folder; give a file in it" in capsys.readouterr().err
