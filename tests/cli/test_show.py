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
from zoo.engine.digest import digest, state_tensors
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
    assert shown["network"] == read_weights(finished.checkpoint).record.content()
    assert (shown["epochs_done"], shown["steps_done"], shown["moving_average"]) == (2, 6, False)
    assert 0 <= shown["best_score"] <= 100
    assert shown["settings"]["optimizer"]["batch_size"] == 8


def test_two_checkpoints_are_compared_by_tensor_names(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = read_checkpoint(finished.checkpoint)
    assert main(["show", str(finished.checkpoint), str(finished.checkpoint)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == second == f"{digest(state_tensors(content))}  {finished.checkpoint}"
    assert last == "equal"
    name = next(key for key, tensor in sorted(content["state_dict"].items()) if tensor.shape == (2,))
    content["state_dict"][name][1] += 1
    content["optimizer"]["state"][0]["momentum_buffer"].zero_()
    torch.save(content, tmp_path / "other.pth.tar")
    assert main(["show", str(finished.checkpoint), str(tmp_path / "other.pth.tar")]) == 3
    _, _, *names, last = capsys.readouterr().out.splitlines()
    assert names[0] == f"{name}: 1 of 2 values, by up to 1"
    assert names[1].startswith("optimizer.0.momentum_buffer: ")
    assert last == f"2 of {len(state_tensors(content))} tensors differ"


def test_weights_file_without_training_state_is_compared(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read_checkpoint(finished.checkpoint)["state_dict"]
    torch.save(weights, tmp_path / "bare.pth")
    torch.save({"state_dict": weights}, tmp_path / "wrapped.pth")
    assert main(["show", str(tmp_path / "bare.pth"), str(tmp_path / "wrapped.pth")]) == 0
    assert capsys.readouterr().out.endswith("equal\n")
