"""Training continues while a checkpoint is written, and the checkpoint does not change."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import MemoryLog, differences, make_config, run, terminate_at
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.engine import _checkpoint as checkpoint
from zoo.engine._checkpoint import CHECKPOINT, PREVIOUS, read
from zoo.engine._reporting import TrainMetrics
from zoo.errors import CheckpointError, TrainingInterrupted

TIMEOUT_S = 20.0
EVERY_STEPS = 3  # an epoch has 5 steps


def _config() -> Experiment:
    return make_config(checkpoint={"every_steps": EVERY_STEPS})


class _HeldWrites:
    """Takes the place of `checkpoint.write`: each write waits until `go` is set, and is noted with its step."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.events: list[tuple[str, int]] = []
        self._write = checkpoint.write

    def __call__(self, content: dict[str, Any], *args: Any) -> None:
        step = content["position"]["step"]
        self.events.append(("begin", step))
        assert self.go.wait(TIMEOUT_S)
        self._write(content, *args)
        self.events.append(("end", step))


def test_steps_during_write_do_not_change_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainingInterrupted):  # a run that ends at the step of the compared checkpoint
        run(_config(), data, tmp_path / "stopped", MemoryLog(terminate_at(3)))
    held = _HeldWrites()
    monkeypatch.setattr(checkpoint, "write", held)
    (tmp_path / "log").mkdir()
    written: list[dict[str, Any]] = []

    def look(metrics: TrainMetrics) -> None:
        if metrics.step == 5:
            assert held.events == [("begin", 3)]
            held.go.set()
            while len(held.events) < 2:
                time.sleep(0.001)
            written.append(read(tmp_path / "log" / CHECKPOINT))

    run(_config(), data, tmp_path / "log", MemoryLog(look))
    assert differences(written[0], read(tmp_path / "stopped" / CHECKPOINT)) == []


def test_save_and_close_wait_for_previous_save(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _HeldWrites()
    held.go.set()
    monkeypatch.setattr(checkpoint, "write", held)
    slow_save = torch.save
    monkeypatch.setattr("torch.save", lambda *args: (time.sleep(0.05), slow_save(*args)))
    run(_config(), data, tmp_path, MemoryLog())
    steps = [3, 5, 6, 9, 10, 12, 15, 15]  # both every three steps and at the end of each epoch
    assert held.events == [(kind, step) for step in steps for kind in ("begin", "end")]
    assert read(tmp_path / CHECKPOINT)["position"]["epoch"] == 3


def test_interrupted_run_ends_when_its_state_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_save = torch.save
    monkeypatch.setattr("torch.save", lambda *args: (time.sleep(0.2), slow_save(*args)))
    refused(
        TrainingInterrupted, lambda: run(_config(), data, tmp_path, MemoryLog(terminate_at(4))), "SIGTERM at step 4 "
    )
    assert [read(tmp_path / name)["position"]["step"] for name in (CHECKPOINT, PREVIOUS)] == [4, 3]
    assert {path.name for path in tmp_path.iterdir()} == {CHECKPOINT, PREVIOUS}


def _fail_at(step: int, monkeypatch: pytest.MonkeyPatch, after_s: float = 0.0) -> None:
    """Let the disk be full when the state after ``step`` has been written for ``after_s``."""
    original = torch.save

    def full(content: dict[str, Any], *args: Any) -> None:
        if "position" in content and content["position"]["step"] == step:  # the best weights have none
            time.sleep(after_s)
            raise OSError(28, "No space left on device")
        original(content, *args)

    monkeypatch.setattr("torch.save", full)


@pytest.mark.parametrize(
    ("fail_at", "every_steps", "log_interval", "last_reports"),
    [(3, 3, 1, (3, 4)), (6, 3, 100, (5,)), (15, 0, 100, (15,))],
    ids=["report", "save", "end"],
)
def test_failed_write_ends_run(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail_at: int,
    every_steps: int,
    log_interval: int,
    last_reports: tuple[int, ...],
) -> None:
    _fail_at(fail_at, monkeypatch)
    reports: list[int] = []

    def note(metrics: TrainMetrics) -> None:
        reports.append(metrics.step)
        time.sleep(0.1 * (metrics.step == fail_at + 1))  # by then the write has failed

    config = make_config(checkpoint={"every_steps": every_steps})
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        run(config, data, tmp_path, MemoryLog(note), log_interval=log_interval)
    assert error.value.exit_code == 2
    assert reports[-1] in last_reports
    assert not list(tmp_path.glob(".*"))
    if fail_at > 3:
        assert "checkpoint.pth.tar, is intact" in str(error.value)
        assert read(tmp_path / CHECKPOINT)["position"]["step"] < fail_at
