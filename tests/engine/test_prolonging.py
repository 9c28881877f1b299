"""A run with more epochs than its checkpoint's goes on, and is the run that it would have been from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import MemoryLog, differences, make_config, make_images, run
from zoo.config import Experiment
from zoo.engine.checkpoint import CHECKPOINT, read

PARAMS: dict[str, dict[str, Any]] = {
    "multistep": {"milestones": [3, 12], "gamma": 0.5}, "triangle": {"peak_epoch": 0.5},
}  # fmt: skip


def _config(kind: str, epochs: int) -> Experiment:
    return make_config(
        optimizer={"schedule": {"type": kind, "mode": "step", "epochs": epochs, "params": PARAMS.get(kind, {})}}
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=24)


def test_a_finished_run_that_is_prolonged_has_the_bits_of_a_run_that_was_as_long_from_the_start(
    data: Path, tmp_path: Path
) -> None:
    straight, prolonged, log = tmp_path / "straight", tmp_path / "prolonged", MemoryLog()
    run(_config("multistep", 3), data, straight, MemoryLog())
    run(_config("multistep", 2), data, prolonged, MemoryLog())
    run(_config("multistep", 3), data, prolonged, log, resume="auto")
    assert [epoch for epoch, *_ in log.validations] == [2]
    assert differences(read(straight / CHECKPOINT), read(prolonged / CHECKPOINT)) == []


@pytest.mark.parametrize("kind", ["cosine", "triangle"])
def test_a_schedule_that_depends_on_its_end_goes_on_as_that_of_the_new_end(
    data: Path, tmp_path: Path, kind: str
) -> None:
    run(_config(kind, 1), data, tmp_path, MemoryLog())
    log, longer = MemoryLog(), _config(kind, 3)
    run(longer, data, tmp_path, log, resume="auto")
    schedule, rate = longer.optimizer.schedule, longer.optimizer.learning_rate
    expected = [rate * schedule.factor(epoch, batch, 3, rate) for epoch in (1, 2) for batch in range(3)]
    assert [metrics.lr for metrics in log.metrics] == pytest.approx(expected)
    assert expected[0] > 0
