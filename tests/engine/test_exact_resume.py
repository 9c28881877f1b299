"""A run that was killed and resumed is, to the bit, the run that was never killed.

The processes train for real and are ended by SIGKILL in the middle of an epoch, some steps after a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any
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
from zoo.config import Experiment, parse_experiment
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.process import open_process
from zoo.errors import CheckpointError
from zoo.registry import build_from_config

pytestmark = pytest.mark.dist

KILL_AT, EVERY_STEPS = 8, 3  # of 5 steps per epoch: in the second epoch, two steps after a checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"))


def _run_rank(rank: int, world_size: int, port: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    prepare_process(rank, world_size, port)
    with open_process():
        run_until_killed(*args, **options)


def _kill_at(step: int, world_size: int, config: Experiment, data: Path, log_dir: Path, **options: Any) -> None:
    """Train in processes of their own and kill them, as `kill -9` does, when all have reported ``step``.

    The last checkpoint is written by then.
    """
    saved = step // config.checkpoint.every_steps * config.checkpoint.every_steps
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log_dir.mkdir()
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


@pytest.mark.parametrize("workers", [(0, 0, 0), (0, 2, 1)], ids=["no-workers", "other-workers"])
def test_a_killed_run_ends_as_the_straight_one(data: Path, tmp_path: Path, workers: tuple[int, int, int]) -> None:
    config = make_config(checkpoint={"every_steps": EVERY_STEPS})
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    (numbers,) = run_distributed(_numbers_of_run, 1, config, data, straight, {"workers": workers[0]}, group=False)
    _kill_at(KILL_AT, 1, config, data, killed, workers=workers[1])
    assert read(killed / CHECKPOINT)["position"] == {"epoch": 1, "batch": 1, "step": 6, "num_images": 40}
    options = {"workers": workers[2], "resume": "auto"}
    (rest,) = run_distributed(_numbers_of_run, 1, config, data, killed, options, group=False)
    assert rest == numbers[6:]
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


def test_a_run_that_is_killed_during_a_write_goes_on_from_the_checkpoint_before(data: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("world_size", "accumulate_steps"), [pytest.param(2, 1, marks=pytest.mark.smoke), (3, 2)])
def test_killed_processes_end_as_the_straight_ones(
    data: Path, tmp_path: Path, world_size: int, accumulate_steps: int
) -> None:
    optimizer = {"batch_size": 12 if world_size == 3 else 8, "accumulate_steps": accumulate_steps}
    config = make_config(checkpoint={"every_steps": EVERY_STEPS}, optimizer=optimizer)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    numbers = run_distributed(_numbers_of_run, world_size, config, data, straight, {})
    _kill_at(KILL_AT - 1, world_size, config, data, killed)
    rest = run_distributed(_numbers_of_run, world_size, config, data, killed, {"resume": "auto"})
    assert rest == [each[6:] for each in numbers]
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []


def test_a_killed_run_of_a_lean_network_ends_as_the_straight_one(tmp_path: Path) -> None:
    network = {"arch": "torchvision:resnet18", "classes": 2, "memory": "lean"}
    images = make_images(tmp_path / "data", num_train=48, num_val=4)
    sizes = {"crop_train": 32, "scale_val": 32, "crop_val": 32}
    schedule = {"type": "linear", "mode": "step", "epochs": 2, "params": {"alpha": -0.1, "beta": 1.0}}
    optimizer = {"batch_size": 16, "learning_rate": 0.01, "nesterov": True, "decay_norms": False, "schedule": schedule}
    config = make_config(input=sizes, optimizer=optimizer, checkpoint={"every_steps": 2})
    config = parse_experiment({**config.model_dump(mode="json"), "network": network}, "test")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    options = {"build": build_from_config}
    (numbers,) = run_distributed(_numbers_of_run, 1, config, images, straight, options, group=False)
    _kill_at(5, 1, config, images, killed, **options)
    options["resume"] = "auto"
    (rest,) = run_distributed(_numbers_of_run, 1, config, images, killed, options, group=False)
    assert len(numbers) == 6
    assert rest == numbers[4:]
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []


def _numbers_of_both(config: Experiment, data: Path, straight: Path, killed: Path) -> tuple[list[Any], list[Any]]:
    """Train without a break in one folder, and go on with the run in the other."""
    options = {"build": build_segmenter}
    return (
        _numbers_of_run(config, data, straight, options),
        _numbers_of_run(config, data, killed, {**options, "resume": "auto"}),
    )


def test_a_killed_segmentation_ends_as_the_straight_one(tmp_path: Path) -> None:
    """The sums of its epoch are a confusion matrix, and its crops are drawn class by class."""
    images = make_labeled(tmp_path / "data", num_train=16, num_val=2)
    config = make_segmentation_config(checkpoint={"every_steps": EVERY_STEPS})
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _kill_at(7, 1, config, images, killed, build=build_segmenter)
    assert read(killed / CHECKPOINT)["position"] == {"epoch": 1, "batch": 2, "step": 6, "num_images": 16}
    ((numbers, rest),) = run_distributed(_numbers_of_both, 1, config, images, straight, killed, group=False)
    assert len(numbers) == 8
    assert rest == numbers[6:]
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []
