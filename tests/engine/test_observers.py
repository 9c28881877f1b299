"""Observers see each step and epoch of a run, which stays bit-identical."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import MemoryLog, make_config, run
from zoo.engine._observers import Observer
from zoo.engine._state import TrainState
from zoo.engine._step import StepBatch
from zoo.engine._task import Result

NUM_BATCHES = 5


class Calls(Observer):
    """Notes its calls with the position of the state."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def before_step(self, state: TrainState, batches: Sequence[StepBatch]) -> None:
        self.calls.append(("before_step", state.epoch, state.step, *(len(batch.images) for batch in batches)))

    def after_step(self, state: TrainState) -> None:
        self.calls.append(("after_step", state.epoch, state.step))

    def before_validation(self, state: TrainState) -> None:
        self.calls.append(("before_validation", state.epoch, state.step))

    def after_epoch(self, state: TrainState, result: Result | None) -> None:
        self.calls.append(("after_epoch", state.epoch, state.step, None if result is None else result.count))


@pytest.mark.parametrize(("replicas", "sizes", "validates"), [(None, [8], True), (3, [3, 3, 2], False)])
def test_observers_follow_steps_and_epochs(
    data: Path, tmp_path: Path, replicas: int | None, sizes: list[int], validates: bool
) -> None:
    observers, config = [Calls(), Calls()], make_config(optimizer={"replicas": replicas})
    run(config, data, tmp_path, MemoryLog(), observers=observers, validates=validates)
    expected: list[tuple[Any, ...]] = []
    for epoch in range(config.optimizer.schedule.epochs):
        first = epoch * NUM_BATCHES
        for batch in range(NUM_BATCHES):
            expected += [("before_step", epoch, first + batch, *sizes), ("after_step", epoch, first + batch + 1)]
        end = first + NUM_BATCHES
        expected += [("before_validation", epoch, end), ("after_epoch", epoch, end, 6 if validates else None)]
    assert [observer.calls for observer in observers] == [expected, expected]
