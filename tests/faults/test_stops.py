"""A run ends on the first signal, also if its next batch never comes, and continues exactly."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import zoo
from tests.cli.conftest import SETTINGS
from tests.dist.spawn import LogLines, run_distributed
from tests.engine.tiny import differences, make_images
from zoo.config.experiment import Experiment
from zoo.config.parse import parse_experiment
from zoo.data.sources import folder
from zoo.engine import _stop as stop
from zoo.engine._checkpoint import CHECKPOINT, read
from zoo.engine._process import open_process
from zoo.run.training import train_experiment

pytestmark = pytest.mark.dist

END_S = 40.0  # on a busy machine; here a rank without its batch gives up after a second


class End(NamedTuple):
    """How a call ended: the error, the lines of its log, the seconds since the signal, and the workers left."""

    error: str
    lines: list[str]
    seconds: float
    num_workers: int


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=24, num_val=4)


@pytest.fixture
def config() -> Experiment:
    content = json.loads(json.dumps(SETTINGS))
    content["optimizer"] |= {"batch_size": 8, "schedule": {"epochs": 2}}
    return parse_experiment(content, "test")


def _sleep() -> None:
    time.sleep(600)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # hangs like dead network storage


class Hang:
    """Reads images, until this process has read ``count`` images of a split; then it reports this, and hangs."""

    def __init__(self, split: str, count: int, hang: Callable[[], None], hung: Path) -> None:
        self._split, self._left, self._hang, self.hung = f"/{split}/", count, hang, hung

    def __call__(self, name: str) -> bytes:
        if self._split in str(name):
            if not self._left:
                self.hung.touch()
                self._hang()
            self._left -= 1
        return READ_BYTES(name)


READ_BYTES: Any = folder.read_bytes


def _run(config: Experiment, data: Path, log_dir: Path, workers: int = 0, resume: str | None = None) -> None:
    with open_process() as process:
        train_experiment(config, data, log_dir, process, workers=workers, log_every=1, resume=resume, weights=None)


def _signaled(number: int, hangs: dict[int, Hang], call: Callable[[], object]) -> End:
    """Call, and send ``number`` to this process as soon as all images of ``hangs``, by rank, hang; return the end."""
    stop.STALL_S = 1.0
    rank, lines, sent_s = int(os.environ["RANK"]), LogLines(), []
    if rank in hangs:
        folder.read_bytes = hangs[rank]  # type: ignore[assignment]

    def send() -> None:
        while not all(hang.hung.exists() for hang in hangs.values()):
            time.sleep(0.02)
        time.sleep(0.5)  # the other ranks reach the place where they wait
        sent_s.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    try:
        call()
    except BaseException as error:
        seconds = time.monotonic() - sent_s[0]
        return End(f"{type(error).__name__}: {error}", lines.texts, seconds, len(multiprocessing.active_children()))
    raise AssertionError("the call was not stopped")


def _stopped(number: int, hangs: dict[int, Hang], *run: Any) -> End:
    return _signaled(number, hangs, lambda: _run(*run))


def _scored(number: int, hangs: dict[int, Hang], checkpoint: Path, data: Path, workers: int) -> End:
    return _signaled(number, hangs, lambda: zoo.score(checkpoint, data, workers=workers))


@pytest.mark.parametrize(
    ("number", "split", "count", "hang", "workers", "position", "world_size"),
    [
        (signal.SIGINT, "train", 10, _sleep, 0, (0, 1), 1),
        (signal.SIGTERM, "train", 10, _sleep, 1, (0, 1), 1),
        (signal.SIGINT, "train", 0, _freeze, 1, (0, 0), 1),
        (signal.SIGTERM, "train", 8, _sleep, 2, (0, 2), 1),
        (signal.SIGINT, "train", 24, _sleep, 0, (1, 0), 1),
        (signal.SIGTERM, "val", 1, _sleep, 1, (0, 3), 1),
        # Several ranks read two steps ahead, so that none is taken before the second batch hangs.
        (signal.SIGTERM, "train", 6, _sleep, 1, (0, 0), 2),
        (signal.SIGINT, "val", 1, _sleep, 1, (0, 3), 2),
    ],
)
def test_run_without_next_batch_is_saved_and_continues_exactly(
    number: signal.Signals,
    split: str,
    count: int,
    hang: Callable[[], None],
    workers: int,
    position: tuple[int, int],
    world_size: int,
    config: Experiment,
    data: Path,
    tmp_path: Path,
) -> None:
    hangs = {rank: Hang(split, count, hang, tmp_path / f"hung{rank}") for rank in range(world_size)}
    log, straight = tmp_path / "log", tmp_path / "straight"
    for end in run_distributed(_stopped, world_size, number, hangs, config, data, log, workers, group=False):
        assert end.error.startswith(f"TrainingInterrupted: {number.name} at step ")
        assert "continue with --resume auto" in end.error
        assert any(line.startswith(f"{number.name}: saving after this batch; ") for line in end.lines)
        assert end.seconds < END_S
    saved = read(log / CHECKPOINT)["position"]
    assert (saved["epoch"], saved["batch"]) == position
    run_distributed(_run, world_size, config, data, log, 0, "auto", group=False)
    run_distributed(_run, world_size, config, data, straight, group=False)
    assert differences(read(log / CHECKPOINT), read(straight / CHECKPOINT)) == []


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_rank_without_batch_ends_other_rank_that_waits_for_its_gradients(
    number: signal.Signals, rank: int, config: Experiment, data: Path, tmp_path: Path
) -> None:
    hangs = {rank: Hang("train", 6, _sleep, tmp_path / "hung")}
    ends = run_distributed(_stopped, 2, number, hangs, config, data, tmp_path / "log", 1, group=False)
    own, other = ends[rank], ends[1 - rank]
    assert own.error in (f"SystemExit: {128 + number}", "KeyboardInterrupt: ")
    assert any(line.startswith(f"{number.name}: no batch came") and "nothing is saved" in line for line in own.lines)
    assert other.error.startswith("RuntimeError: ")
    assert max(own.seconds, other.seconds) < END_S
    assert not (tmp_path / "log" / CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("number", "error", "hang", "workers"),
    [
        (signal.SIGINT, "KeyboardInterrupt: ", _freeze, 2),
        (signal.SIGTERM, "SystemExit: 143", _sleep, 1),
        (signal.SIGTERM, "SystemExit: 143", _sleep, 0),
    ],
)
def test_scoring_without_next_batch_ends_with_its_workers(
    number: signal.Signals,
    error: str,
    hang: Callable[[], None],
    workers: int,
    config: Experiment,
    data: Path,
    tmp_path: Path,
) -> None:
    run_distributed(_run, 1, config, data, tmp_path / "log", group=False)
    hangs = {0: Hang("val", 1, hang, tmp_path / "hung")}
    arguments = number, hangs, tmp_path / "log" / CHECKPOINT, data, workers
    (end,) = run_distributed(_scored, 1, *arguments, group=False)
    assert end.error == error
    assert end.seconds < END_S
    assert end.num_workers == 0
