"""A run that is extended by more epochs is bit-identical to a run that had them from the start."""

from __future__ import annotations

from pathlib import Path

from tests.engine.tiny import MemoryLog, differences, make_config, make_images, run
from zoo.config.experiment import Experiment
from zoo.engine.checkpoint import CHECKPOINT, read


def _config(epochs: int) -> Experiment:
    params = {"milestones": [3, 12], "gamma": 0.5}
    return make_config(
        optimizer={"schedule": {"type": "multistep", "mode": "step", "epochs": epochs, "params": params}}
    )


def test_prolonged_run_is_bit_identical_to_longer_run(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=24)
    straight, prolonged, log = tmp_path / "straight", tmp_path / "prolonged", MemoryLog()
    run(_config(3), data, straight, MemoryLog())
    run(_config(2), data, prolonged, MemoryLog())
    run(_config(3), data, prolonged, log, resume="auto")
    assert [epoch for epoch, *_ in log.validations] == [2]
    assert differences(read(straight / CHECKPOINT), read(prolonged / CHECKPOINT)) == []
