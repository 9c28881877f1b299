"""A run continues from the right checkpoint and refuses others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.spawn import run_distributed
from tests.engine.tiny import build_net, make_config, new_state, save, this_process
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.engine._checkpoint import CHECKPOINT, PREVIOUS, read, write
from zoo.engine._start import start
from zoo.engine._state import TrainState
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


def _schedule(epochs: int) -> dict[str, Any]:
    return {"schedule": {"type": "cosine", "mode": "step", "epochs": epochs, "warmup_epochs": 0.5}}


def _damage_both(folder: Path) -> None:
    _damage(folder / CHECKPOINT)
    _damage(folder / PREVIOUS)


def _change(**changes: Any) -> Callable[[Path], None]:
    """Return a function that replaces entries of the newest checkpoint."""
    return lambda folder: write({**read(folder / CHECKPOINT), **changes}, folder, is_best=False)


def _remove_setting(folder: Path) -> None:
    content = read(folder / CHECKPOINT)
    del content["config"]["network"]["memory"]
    write(content, folder, is_best=False)


def _keep(folder: Path) -> None:
    pass


REFUSALS: dict[str, tuple[Callable[[Path], object], dict[str, Any], tuple[str, ...]]] = {
    "both damaged": (_damage_both, {}, (CHECKPOINT, PREVIOUS, "no good checkpoint")),
    "missing path": (_keep, {"resume": "missing.pth"}, ("missing.pth: ",)),
    "damaged path": (_damage_both, {"resume": CHECKPOINT}, (f"{CHECKPOINT}: ",)),
    "other settings": (
        _keep,
        {"config": make_config(optimizer={"learning_rate": 0.5}, seed=4)},
        ("optimizer.learning_rate: 0.05 before and 0.5 now, seed: 0 before and 4 now", "--weights"),
    ),
    "fewer epochs": (
        _keep,
        {"config": make_config(optimizer=_schedule(2))},
        ("optimizer.schedule.epochs: 3 before and 2 now",),
    ),
    "setting that the checkpoint lacks": (
        _remove_setting,
        {"config": make_config(network={"memory": "plain"})},
        ("network.memory: 'auto' before and 'plain' now",),
    ),
    "other number of processes": (_change(world_size=2), {}, ("2 process(es)", "has 1")),
}


@pytest.mark.parametrize(("change", "options", "names"), REFUSALS.values(), ids=REFUSALS)
def test_unsuitable_checkpoint_raises(
    change: Callable[[Path], object],
    options: dict[str, Any],
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _save_steps(tmp_path, 1, 2)
    change(tmp_path)
    refused(CheckpointError, lambda: _start(tmp_path, **{"resume": "auto", **options}), *names)


def test_settings_without_effect_on_computation_may_change(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1)
    expected = {"source": "a paper", "scores": {"center8": {"top1": 1.0, "top5": 2.0}}}
    changed = make_config(checkpoint={"every_steps": 7}, expected=expected)
    assert _start(tmp_path, config=changed, resume="auto").step == 1


def test_checkpoint_without_new_setting_resumes_with_default(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1)
    _remove_setting(tmp_path)
    assert _start(tmp_path, resume="auto").step == 1


def test_another_thread_count_and_torch_version_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _save_steps(tmp_path, 1)
    _change(num_threads=99, torch_version="0.4.1")(tmp_path)
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
    _damage_both(folders[0])
    first, second = run_distributed(_start_on_rank, 2, [str(folder) for folder in folders])
    assert first == second
    assert "no good checkpoint" in str(first[0])
