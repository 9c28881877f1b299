"""A run that is killed repeatedly ends bit-identical to an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import PRELOADED, free_port, prepare_process
from tests.engine.tiny import differences, make_images
from zoo.cli import main
from zoo.engine._checkpoint import CHECKPOINT, read

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive]

LAUNCHER_S = 5.0
END_S = 120.0  # timeout of a run of two seconds on a busy machine
NUM_KILLS = 50
IN_WRITES = 17  # a third of them
SETTINGS = {
    "network": {"arch": "resnet32_cifar", "classes": 2},
    "optimizer": {"batch_size": 8, "learning_rate": 0.01, "ema_decay": 0.9, "schedule": {"epochs": 3}},
    "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10},
    "checkpoint": {"every_steps": 2},
}


def _train(rank: int, world_size: int, port: int, folder: Path, log_dir: Path) -> None:
    prepare_process(rank, world_size, port)
    with open(folder / f"printed.{rank}", "a") as printed, contextlib.redirect_stderr(printed):
        command = ["train", str(folder / "tiny.json"), str(folder / "data"), "--log-dir", str(log_dir)]
        code = main([*command, "-j", "1", "--resume", "auto"])
    os._exit(code)  # exit like a command, not like a process of a pool


class _Run:
    """`zoo train --resume auto` in separate processes."""

    def __init__(self, folder: Path, log_dir: Path, world_size: int) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "zoo.cli.train", "zoo.run.training"])
        shared = (world_size, free_port(), folder, log_dir)
        self.processes = [context.Process(target=_train, args=(rank, *shared)) for rank in range(world_size)]
        for process in self.processes:
            process.start()

    @property
    def is_over(self) -> bool:
        return not any(process.is_alive() for process in self.processes)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Return True as soon as ``condition`` holds, False when the run is over before."""
        end = time.monotonic() + END_S
        while not condition():
            if self.is_over:
                return False
            assert time.monotonic() < end, f"the run hangs; {[process.pid for process in self.processes]}"
            time.sleep(0.001)
        return True

    def kill(self, ranks: list[int]) -> None:
        """Kill processes with SIGKILL; the others end by themselves, or the launcher ends them."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        for process in self.processes:
            process.join(LAUNCHER_S)
            process.kill()  # waiting for other ranks to join the run takes long
            process.join()

    def join(self) -> list[int]:
        """Return the exit codes of all processes, which have to end soon."""
        for process in self.processes:
            process.join(END_S)
            assert not process.is_alive(), "a process is left"
        return [process.exitcode for process in self.processes]


@pytest.mark.parametrize("world_size", [1, 2])
def test_kill_9_at_random_moments_changes_no_bit_of_result(world_size: int, tmp_path: Path) -> None:
    """With two processes both are killed, or one of them; the other one then ends by itself."""
    chance = random.Random(world_size)
    make_images(tmp_path / "data", num_train=40, num_val=6)
    (tmp_path / "tiny.json").write_text(json.dumps(SETTINGS))
    straight, again = tmp_path / "straight", tmp_path / "again"
    assert _Run(tmp_path, straight, world_size).join() == [0] * world_size
    begin_s = time.monotonic()  # the fork server has been started by now
    assert _Run(tmp_path, again, world_size).join() == [0] * world_size
    whole_s = time.monotonic() - begin_s
    _check(straight, again)

    num_kills = num_in_writes = num_finished = 0
    while num_kills < NUM_KILLS or num_in_writes < IN_WRITES:
        log_dir = tmp_path / f"killed{num_finished}"
        run = _Run(tmp_path, log_dir, world_size)
        delay_s = chance.uniform(0, whole_s)
        if num_in_writes < IN_WRITES and (num_kills % 3 == 0 or num_kills >= NUM_KILLS):
            # A run that was killed while writing leaves this file until it resumes.
            old = _temporaries(log_dir)
            was_reached = run.wait_for(lambda: _temporaries(log_dir) - old)  # noqa: B023 - called in this turn
            time.sleep(chance.uniform(0, 0.01))
        else:
            end = time.monotonic() + delay_s
            was_reached = run.wait_for(lambda: time.monotonic() > end)  # noqa: B023
        if was_reached and not run.is_over:
            run.kill(chance.choice([list(range(world_size)), [chance.randrange(world_size)]]))
            num_kills += 1
            num_in_writes += bool(_temporaries(log_dir))
        if run.join() == [0] * world_size:
            _check(straight, log_dir)
            num_finished += 1
    last = tmp_path / f"killed{num_finished}"
    assert _Run(tmp_path, last, world_size).join() == [0] * world_size
    _check(straight, last)
    assert list((tmp_path).glob("killed*/.*.tmp")) == []


def _temporaries(log_dir: Path) -> set[Path]:
    """Return the files of writes that are going on, or were killed."""
    return set(log_dir.glob(f".{CHECKPOINT}.*.tmp"))


def _check(straight: Path, killed: Path) -> None:
    assert differences(read(straight / CHECKPOINT), read(killed / CHECKPOINT)) == []
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
