"""An intact checkpoint exists at every moment, and no damaged checkpoint is ever accepted."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.spawn import run_distributed
from tests.engine.tiny import build_net, differences, make_config, new_state, save
from tests.faults.fuzz import limit_resource
from tests.refusals import refused
from zoo.engine._checkpoint import BEST, CHECKPOINT, KEYS_OF_BEST, PREVIOUS, parse_progress, read
from zoo.engine._state import TrainState
from zoo.errors import CheckpointError
from zoo.weights._read import read_state_dict

ORIGINAL_KEYS = {"epoch", "arch", "state_dict", "best_prec1", "optimizer"}


def _state(step: int = 0) -> TrainState:
    state = new_state()
    state.step = step
    return state


def _files(folder: Path) -> dict[str, int]:
    """Return the step in each file of ``folder``."""
    return {path.name: read(path)["position"]["step"] for path in folder.iterdir() if path.name != BEST}


def test_checkpoint_holds_tensors_and_plain_python(tmp_path: Path) -> None:
    state = _state()
    state.epoch, state.batch, state.step, state.best_score = 2, 3, 13, 61.5
    content = torch.load(save(state, tmp_path), weights_only=True)
    assert content.keys() > ORIGINAL_KEYS | {"ema", "scaler", "ranks", "config", "config_digest", "format_version"}
    assert (content["epoch"], content["arch"], content["best_prec1"]) == (2, "resnet18", 61.5)
    assert content["position"] == {"epoch": 2, "batch": 3, "step": 13}
    assert list(content["state_dict"]) == list(build_net(state.config.network).state_dict())
    assert (content["world_size"], content["num_threads"]) == (1, torch.get_num_threads())
    assert content["config_digest"] == state.config.digest()
    assert len(content["ranks"]) == 1


def test_last_two_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    for step, is_best in ((1, True), (2, False), (3, False)):
        state = _state(step)
        state.epoch = step
        save(state, tmp_path, is_best)
    assert _files(tmp_path) == {CHECKPOINT: 3, PREVIOUS: 2}
    assert torch.load(tmp_path / BEST, weights_only=True)["epoch"] == 1


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_best_file_holds_no_training_state(tmp_path: Path, ema_decay: float | None) -> None:
    state = new_state(make_config(optimizer={"ema_decay": ema_decay}))
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1.0)  # so that the moving average has other values
    state.epoch, state.best_score, state.best_epoch = 2, 61.5, 1
    checkpoint = save(state, tmp_path, is_best=True)
    best = torch.load(tmp_path / BEST, weights_only=True)
    assert best.keys() <= {"state_dict", "averaged", *KEYS_OF_BEST}
    assert differences(best["state_dict"], state.scored_model.state_dict()) == []
    assert best["averaged"] == (ema_decay is not None)
    assert (best["epoch"], best["best_prec1"], best["best_epoch"]) == (2, 61.5, 1)
    assert parse_progress(best)["moving_average"] == (ema_decay is not None)
    assert (tmp_path / BEST).stat().st_size < checkpoint.stat().st_size
    read_back = read_state_dict(tmp_path / BEST)
    assert differences(read_back, read_state_dict(checkpoint)) == []


@pytest.mark.parametrize("num_bytes", [0, 1000, 12_000])
def test_full_disk_keeps_previous_checkpoint(tmp_path: Path, num_bytes: int) -> None:
    save(_state(1), tmp_path)
    with limit_resource(resource.RLIMIT_FSIZE, num_bytes):
        refused(CheckpointError, lambda: save(_state(2), tmp_path, is_best=True), "File too large", f"{CHECKPOINT}, is")
    assert _files(tmp_path) == {CHECKPOINT: 1}
    save(_state(3), tmp_path)
    assert _files(tmp_path) == {CHECKPOINT: 3, PREVIOUS: 1}


@pytest.mark.parametrize("call", ["save", "fsync", "replace"])
def test_killed_save_leaves_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    save(_state(1), tmp_path)
    module = torch if call == "save" else os
    original = getattr(module, call)
    num_calls = 0

    class Killed(BaseException):
        pass

    def die_at_last(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if call == "replace" and num_calls == 1:
            return original(*args, **kwargs)  # die between the two renames
        raise Killed

    monkeypatch.setattr(module, call, die_at_last)
    with pytest.raises(Killed):
        save(_state(2), tmp_path)
    monkeypatch.undo()
    newest = next(tmp_path / name for name in (CHECKPOINT, PREVIOUS) if (tmp_path / name).exists())
    assert read(newest)["position"]["step"] == 1


def _save_where_rank_0_cannot(folder: str) -> tuple[str, list[str], float]:
    target, state = Path(folder), _state(step=5)
    state.model[1].running_mean.fill_(1 + state.process.rank)
    try:
        save(state, target / "nowhere")
    except CheckpointError as error:
        message = str(error)
    save(state, target)
    return message, sorted(path.name for path in target.iterdir()), state.model[1].running_mean.mean().item()


@pytest.mark.dist
def test_write_failure_reaches_every_rank(tmp_path: Path) -> None:
    first, second = run_distributed(_save_where_rank_0_cannot, 2, str(tmp_path))
    assert "cannot be written" in first[0]
    assert first[1] == [CHECKPOINT]
    assert first[2] == 1.0  # after a save all ranks have the buffers that a resume would load
    assert second == first
    assert len(read(tmp_path / CHECKPOINT)["ranks"]) == 2
