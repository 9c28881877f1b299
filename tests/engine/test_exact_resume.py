"""A run that is killed and resumed is bit-identical to an uninterrupted run.

The processes train for real and are ended by SIGKILL in the middle of an epoch, some steps after a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.data.sample_labels import make_labeled
from tests.dist.spawn import PRELOADED, TIMEOUT_S, free_port, prepare_process, run_distributed
from tests.engine.tiny import (
    MemoryLog,
    build_segmenter,
    differences,
    make_config,
    make_images,
    make_segmentation_config,
    run,
    run_until_killed,
)
from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.process import open_process
from zoo.errors import CheckpointError
from zoo.registry.get import build_from_config

pytestmark = pytest.mark.dist

KILL_AT, EVERY_STEPS = 8, 3  # an epoch has 5 steps: in the second epoch, two steps after a checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"))


def _run_rank(rank: int, world_size: int, port: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    prepare_process(rank, world_size, port)
    with open_process():
        run_until_killed(*args, **options)


def kill_at(step: int, world_size: int, config: Experiment, data: Path, log_dir: Path, **options: Any) -> None:
    """Train in separate processes and kill them with SIGKILL when all have reported ``step``.

    The last checkpoint is written by then.
    """
    saved = step // config.checkpoint.every_steps * config.checkpoint.every_steps
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log_dir.mkdir(exist_ok=True)
    for reached in log_dir.glob("reached.*"):
        reached.unlink()
    shared = (world_size, free_port(), (config, data, log_dir, step), options)
    processes = [context.Process(target=_run_rank, args=(rank, *shared)) for rank in range(world_size)]
    for process in processes:
        process.start()
    end = time.monotonic() + TIMEOUT_S
    while len(list(log_dir.glob("reached.*"))) < world_size or _saved_step(log_dir) < saved:
        assert all(process.is_alive() for process in processes), "a process ended by itself"
        assert time.monotonic() < end, f"step {step} was not reached"
        time.sleep(0.02)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL


def _saved_step(log_dir: Path) -> int:
    try:
        return read(log_dir / CHECKPOINT)["position"]["step"]
    except CheckpointError:  # there is none, for a moment also between the two renames of a save
        return -1


def _numbers_of_run(config: Experiment, data: Path, log_dir: Path, options: dict[str, Any]) -> list[tuple[float, ...]]:
    log = MemoryLog()
    run(config, data, log_dir, log, **options)
    return log.numbers


class Case(NamedTuple):
    """Settings of a run, its data, options of `run` before and after the kill, and the step to kill it at."""

    config: Experiment
    data: Path
    kill_at: int = KILL_AT
    world_size: int = 1
    options: Mapping[str, Any] = MappingProxyType({})
    options_after: Mapping[str, Any] = MappingProxyType({})


def _classification(folder: Path, world_size: int = 1, parts: int = 1, workers: int = 0) -> Case:
    optimizer = {"batch_size": 12 if world_size == 3 else 8, "accumulate_steps": parts}
    config = make_config(checkpoint={"every_steps": EVERY_STEPS}, optimizer=optimizer)
    return Case(config, make_images(folder), KILL_AT - (world_size > 1), world_size, {"workers": workers})


def _frozen(folder: Path) -> Case:
    """Norms of the stem stay in evaluation mode after the resume, too."""
    optimizer = {"freeze": ["[01]"]}
    config = make_config(checkpoint={"every_steps": EVERY_STEPS}, optimizer=optimizer)
    return Case(config, make_images(folder))


def _lean(folder: Path) -> Case:
    network = {"arch": "torchvision:resnet18", "classes": 2, "memory": "lean"}
    sizes = {"crop_train": 32, "scale_val": 32, "crop_val": 32}
    schedule = {"type": "linear", "mode": "step", "epochs": 2, "params": {"alpha": -0.1, "beta": 1.0}}
    optimizer = {"batch_size": 16, "learning_rate": 0.01, "nesterov": True, "decay_norms": False, "schedule": schedule}
    config = make_config(input=sizes, optimizer=optimizer, checkpoint={"every_steps": 2})
    config = parse_experiment({**config.model_dump(mode="json"), "network": network}, "test")
    return Case(config, make_images(folder, num_train=48, num_val=4), kill_at=5, options={"build": build_from_config})


def _released(folder: Path) -> Case:
    optimizer = {"type": "AdamW", "learning_rate": 0.01, "clip": 0, "accumulate_steps": 2, "release_gradients": True}
    return Case(make_config(checkpoint={"every_steps": EVERY_STEPS}, optimizer=optimizer), make_images(folder))


def _segmentation(folder: Path) -> Case:
    """The sums of its epoch are a confusion matrix, and its crops are drawn class by class."""
    config = make_segmentation_config(checkpoint={"every_steps": EVERY_STEPS})
    data = make_labeled(folder, num_train=16, num_val=2)
    return Case(config, data, kill_at=7, options={"build": build_segmenter})


CASES: dict[str, Callable[[Path], Case]] = {
    "classification": _classification,
    "other workers": lambda folder: _classification(folder, workers=2)._replace(options_after={"workers": 1}),
    "two ranks": partial(_classification, world_size=2),
    "three ranks, two parts": partial(_classification, world_size=3, parts=2),
    "frozen": _frozen,
    "lean": _lean,
    "released gradients": _released,
    "segmentation": _segmentation,
}


@pytest.mark.parametrize("name", CASES)
def test_killed_and_resumed_run_is_bit_identical_to_uninterrupted_run(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path / "data")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    every = case.config.checkpoint.every_steps
    saved = case.kill_at // every * every

    def train(log_dir: Path, options: dict[str, Any]) -> list[list[tuple[float, ...]]]:
        arguments = (case.config, case.data, log_dir, options)
        return run_distributed(_numbers_of_run, case.world_size, *arguments, group=case.world_size > 1)

    numbers = train(straight, {**case.options, "workers": 0})
    kill_at(case.kill_at, case.world_size, case.config, case.data, killed, **case.options)
    assert read(killed / CHECKPOINT)["position"]["step"] == saved
    assert train(killed, {**case.options, **case.options_after, "resume": "auto"}) == [each[saved:] for each in numbers]
    assert len(numbers[0]) > case.kill_at
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []


def _hold_in_write(held_step: int, folder: Path, config: Experiment, data: Path, log_dir: Path) -> None:
    """Train until a part of the checkpoint after ``held_step`` is written, and a step after it is done."""
    write = torch.save

    def hold(content: dict[str, Any], file: Any) -> None:
        if "position" not in content or content["position"]["step"] < held_step:  # the best weights have none
            write(content, file)
            return
        file.write(bytes(1000))
        file.flush()
        (folder / "writing").touch()
        time.sleep(600)

    with mock.patch("torch.save", hold):
        run_until_killed(config, data, log_dir, held_step + 1)


def test_run_killed_during_write_resumes_from_previous_checkpoint(data: Path, tmp_path: Path) -> None:
    config = make_config(checkpoint={"every_steps": EVERY_STEPS})
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(config, data, straight, MemoryLog())
    process = multiprocessing.get_context("forkserver").Process(
        target=_hold_in_write, args=(6, tmp_path, config, data, killed)
    )
    process.daemon = True
    process.start()
    end = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "writing").exists() or not (killed / "reached.0").exists():
        assert process.is_alive(), "the process ended by itself"
        assert time.monotonic() < end, "the write was not reached"
        time.sleep(0.02)
    process.kill()
    process.join()
    assert list(killed.glob(f".{CHECKPOINT}.*.tmp"))
    assert read(killed / CHECKPOINT)["position"]["step"] == 5
    assert _numbers_of_run(config, data, killed, {"resume": "auto"})[0][0] == 6
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []
