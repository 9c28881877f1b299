"""Interrupted training runs, and their files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, differences, make_config, make_images, run
from tests.refusals import refused
from zoo.engine.checkpoint import BEST, CHECKPOINT, read
from zoo.errors import TrainingInterrupted


class SignalingLog(MemoryLog):
    """A log that sends this process a signal after ``after`` batches of a validation."""

    def __init__(self, after: int, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self._after, self._number = after, number
        self.validated = 0

    @contextmanager
    def progress(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[int], object]]:
        with super().progress(title, total, done) as advance:
            yield advance if title != "validation" else self._advance

    def _advance(self, count: int) -> None:
        self.validated += count
        if self.validated == self._after:
            os.kill(os.getpid(), self._number)


def _content(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_signal_in_validation_stops_it_and_loses_nothing_of_epoch(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_val=16)  # four batches
    run(make_config(), data, tmp_path / "straight", MemoryLog())
    log = SignalingLog(after=2)
    refused(TrainingInterrupted, lambda: run(make_config(), data, tmp_path / "stopped", log), "SIGTERM at step 5 ")
    assert log.validated == 2
    assert log.validations == []
    stopped = tmp_path / "stopped"
    assert read(stopped / CHECKPOINT)["position"] == {"epoch": 0, "batch": 5, "step": 5}
    assert not (stopped / BEST).exists()
    rest = MemoryLog()
    run(make_config(), data, stopped, rest, resume="auto")
    assert [epoch for epoch, *_ in rest.validations] == [0, 1, 2]
    for name in (CHECKPOINT, BEST):
        assert differences(_content(tmp_path / "straight" / name), _content(stopped / name)) == []


def _stopped_in_a_validation(data: str, log_dir: str, signaled_rank: int, after: int) -> tuple[str, int]:
    log = SignalingLog(after if torch.distributed.get_rank() == signaled_rank else -1)
    try:
        run(make_config(), Path(data), Path(log_dir), log)
    except TrainingInterrupted as error:
        return str(error), log.validated
    raise AssertionError("the run was not interrupted")


def _train(data: str, log_dir: str) -> None:
    run(make_config(), Path(data), Path(log_dir), MemoryLog(), resume="auto")


@pytest.mark.dist
@pytest.mark.parametrize(("signaled_rank", "after"), [(1, 1), (0, 6)])
def test_ranks_leave_validation_together_after_signal(tmp_path: Path, signaled_rank: int, after: int) -> None:
    data = make_images(tmp_path / "data", num_val=41)  # six batches on rank 0, five on rank 1
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_distributed(_train, 2, str(data), str(straight))
    ends = run_distributed(_stopped_in_a_validation, 2, str(data), str(stopped), signaled_rank, after)
    assert ends[0][0] == ends[1][0]
    assert "SIGTERM at step 5" in ends[0][0]
    if after < 5:
        assert all(validated <= after + 1 for _, validated in ends)
    # After the very last batch, ranks agree on a signal once the validation has been counted and saved.
    assert read(stopped / CHECKPOINT)["position"]["epoch"] == (after == 6)
    run_distributed(_train, 2, str(data), str(stopped))
    for name in (CHECKPOINT, BEST):
        assert differences(_content(straight / name), _content(stopped / name)) == []
