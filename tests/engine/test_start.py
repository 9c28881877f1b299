"""A run continues from the right checkpoint and refuses others."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.spawn import run_distributed
from tests.engine.tiny import build_net, make_config, new_state, save, this_process
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.engine.checkpoint import CHECKPOINT, PREVIOUS, read, write
from zoo.engine.start import start
from zoo.engine.state import TrainState
from zoo.errors import CheckpointError
from zoo.tasks import task_of


def _save_steps(folder: Path, *steps: int, config: Experiment | None = None) -> TrainState:
    """Write a checkpoint for each step and return the last state."""
    for step in steps:
        torch.manual_seed(step)
        state = new_state(config)
        state.step = step
        state.meter.update(torch.tensor(1.0), torch.zeros(2, dtype=torch.int64), step, step)
        save(state, folder)
    return state


def _start(folder: Path, config: Experiment | None = None, **options: Any) -> TrainState:
    return start(task_of(config or make_config()), this_process(), folder, build=build_net, **options)


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_auto_falls_back_to_previous_checkpoint_with_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _save_steps(tmp_path, 1, 2)
    _damage(tmp_path / CHECKPOINT)
    assert _start(tmp_path, resume="auto").step == 1
    assert "damaged" in caplog.messages[0]
    assert caplog.messages[1] == f"falling back to {tmp_path / PREVIOUS}"


def test_auto_falls_back_when_save_died_between_its_two_renames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _save_steps(tmp_path, 1)
    (tmp_path / CHECKPOINT).rename(tmp_path / PREVIOUS)
    assert _start(tmp_path, resume="auto").step == 1
    assert caplog.messages[0] == f"there is no {tmp_path / CHECKPOINT}"


def test_auto_never_restarts_over_damaged_checkpoints(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1, 2)
    _damage(tmp_path / CHECKPOINT)
    _damage(tmp_path / PREVIOUS)
    refused(CheckpointError, lambda: _start(tmp_path, resume="auto"), CHECKPOINT, PREVIOUS)


def test_missing_or_damaged_path_raises(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1, 2)
    _damage(tmp_path / CHECKPOINT)
    for name in ("missing.pth", CHECKPOINT):
        path = str(tmp_path / name)
        refused(CheckpointError, partial(_start, tmp_path, resume=path), f"{path}: ")


def test_changed_settings_raise_with_both_values(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1)
    changed = make_config(optimizer={"learning_rate": 0.5}, seed=4)
    names = "optimizer.learning_rate: 0.05 before and 0.5 now, seed: 0 before and 4 now", "--weights"
    refused(CheckpointError, lambda: _start(tmp_path, config=changed, resume="auto"), *names)
    shorter = make_config(optimizer=_schedule(2))
    names = ("optimizer.schedule.epochs: 3 before and 2 now",)
    refused(CheckpointError, lambda: _start(tmp_path, config=shorter, resume="auto"), *names)


def _schedule(epochs: int, kind: str = "cosine") -> dict[str, Any]:
    return {"schedule": {"type": kind, "mode": "step", "epochs": epochs, "warmup_epochs": 0.5}}


def test_settings_without_effect_on_computation_may_change(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1)
    expected = {"source": "a paper", "scores": {"center8": {"top1": 1.0, "top5": 2.0}}}
    changed = make_config(checkpoint={"every_steps": 7}, expected=expected)
    assert _start(tmp_path, config=changed, resume="auto").step == 1


def test_checkpoint_without_new_setting_resumes_with_default(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1)
    content = read(tmp_path / CHECKPOINT)
    del content["config"]["network"]["memory"]
    write(content, tmp_path, is_best=False)
    assert _start(tmp_path, resume="auto").step == 1
    plain = make_config(network={"memory": "plain"})
    names = ("network.memory: 'auto' before and 'plain' now",)
    refused(CheckpointError, lambda: _start(tmp_path, config=plain, resume="auto"), *names)


def test_another_number_of_processes_raises(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1)
    content = read(tmp_path / CHECKPOINT)
    write({**content, "world_size": 2, "ranks": content["ranks"] * 2}, tmp_path, is_best=False)
    refused(CheckpointError, lambda: _start(tmp_path, resume="auto"), "2 process(es)", "has 1")


def test_another_thread_count_and_torch_version_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _save_steps(tmp_path, 1)
    changes = {"num_threads": 99, "torch_version": "0.4.1"}
    write({**read(tmp_path / CHECKPOINT), **changes}, tmp_path, is_best=False)
    _start(tmp_path, resume="auto")
    assert any(message.startswith("threads: 99 at the checkpoint") for message in caplog.messages)
    assert any(message.startswith("torch: 0.4.1 at the checkpoint") for message in caplog.messages)


def test_run_starts_from_checkpoint_then_weights_then_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder, weights = tmp_path / "log", tmp_path / "weights.pth"
    folder.mkdir()
    given = build_net(make_config().network)
    torch.save(given.state_dict(), weights)

    scratch = _start(folder, resume="auto")
    assert not _equal(scratch.model, given)
    from_weights = _start(folder, resume="auto", weights=str(weights))
    assert _equal(from_weights.model, given)
    assert from_weights.ema is not None
    assert _equal(from_weights.ema, given)
    assert caplog.messages == [f"initial weights: {len(given.state_dict())} tensors loaded from {weights}"]
    saved = _save_steps(folder, 3)
    assert _equal(_start(folder, resume="auto", weights=str(weights)).model, saved.model)
    assert "are ignored: the run resumes" in caplog.messages[1]


def _start_on_rank(folders: list[str]) -> tuple[str | int, float]:
    folder = Path(folders[torch.distributed.get_rank()])
    try:
        state = _start(folder, resume="auto")
    except CheckpointError as error:
        return str(error), 0.0
    return state.step, state.model[0].weight.sum().item()


@pytest.mark.dist
def test_all_ranks_resume_or_fail_with_rank_0(tmp_path: Path) -> None:
    folders = [tmp_path / "machine0", tmp_path / "machine1"]
    for folder in folders:
        folder.mkdir()
    _save_steps(folders[0], 4)
    content = read(folders[0] / CHECKPOINT)
    write({**content, "world_size": 2, "ranks": content["ranks"] * 2}, folders[0], is_best=False)
    shutil.rmtree(folders[1])
    first, second = run_distributed(_start_on_rank, 2, [str(folder) for folder in folders])
    assert first == second
    assert first[0] == 4
    _damage(folders[0] / CHECKPOINT)
    _damage(folders[0] / PREVIOUS)
    first, second = run_distributed(_start_on_rank, 2, [str(folder) for folder in folders])
    assert first == second
    assert "no good checkpoint" in str(first[0])
