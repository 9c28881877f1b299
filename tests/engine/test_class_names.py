"""A run keeps the names of its classes, and does not go on with other ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.tiny import MemoryLog, make_config, make_images, run
from zoo.engine.checkpoint import CHECKPOINT
from zoo.errors import CheckpointError
from zoo.spec.network import NetworkSpec
from zoo.weights.stored_spec import parse_stored_spec


def _run(data: Path, log_dir: Path, epochs: int, resume: str | None = None) -> NetworkSpec | None:
    config = make_config(optimizer={"schedule": {"epochs": epochs}})
    run(config, data, log_dir, MemoryLog(), resume=resume)
    return parse_stored_spec(torch.load(log_dir / CHECKPOINT, weights_only=True), CHECKPOINT)


def test_a_checkpoint_says_which_network_it_is_of_and_names_its_classes(tmp_path: Path) -> None:
    record = _run(make_images(tmp_path / "data", num_train=16), tmp_path / "log", epochs=1)
    assert record is not None
    assert (record.arch, record.norm, record.activation, record.num_classes) == ("resnet18", "inplace", "leaky_relu", 2)
    assert record.class_names == ["class0", "class1"]
    assert record.preprocessing is not None
    assert (record.preprocessing.scale_val, record.preprocessing.crop_val) == (8, 8)


def _stop_after_first_epoch(data: Path, log_dir: Path) -> None:
    """Leave the checkpoint of a run of two epochs that was stopped after one."""

    class Stop(Exception):
        pass

    class StopLog(MemoryLog):
        def validation(self, epoch: int, *rest: object) -> None:
            if epoch == 1:
                raise Stop

    with pytest.raises(Stop):
        run(make_config(optimizer={"schedule": {"epochs": 2}}), data, log_dir, StopLog())


def test_a_run_does_not_go_on_with_other_classes(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=16)
    _stop_after_first_epoch(data, tmp_path / "log")
    for split in ("train", "val"):
        (data / split / "class1").rename(data / split / "other")
    with pytest.raises(CheckpointError, match=r"the classes differ from .*class1.*other.*--weights"):
        _run(data, tmp_path / "log", epochs=2, resume="auto")
