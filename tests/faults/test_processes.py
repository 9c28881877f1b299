"""Ranks that were started with different settings or data, and data loader workers that die."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.cli.conftest import SETTINGS, Run
from tests.dist.spawn import run_distributed
from tests.engine.tiny import make_images, new_state, save
from zoo.cli import main
from zoo.engine._checkpoint import CHECKPOINT, read
from zoo.engine._process import shorten_worker_errors
from zoo.errors import CheckpointError, ZooError

pytestmark = pytest.mark.dist

END_S = 30.0  # Gloo itself would wait for half an hour


def _command_on_rank(commands: list[list[str]], folder: str) -> tuple[int, str, float]:
    """Run this rank's command; return its exit code, its stderr, and the seconds it took."""
    os.chdir(folder)
    printed, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(printed):
        code = main(commands[int(os.environ["RANK"])])
    return code, printed.getvalue(), time.monotonic() - start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, others with an image less, settings, others with another rate, and two files of weights."""
    root = tmp_path_factory.mktemp("ranks")
    shutil.copytree(make_images(root / "data", num_train=16, num_val=4), root / "less")
    (root / "less/val/class0/2.png").unlink()
    (root / "used").mkdir()
    (root / "used" / "model_best.pth.tar").touch()
    for name, rate in (("a", 0.01), ("b", 0.5)):
        settings = {**SETTINGS, "optimizer": {**SETTINGS["optimizer"], "learning_rate": rate}}
        (root / f"{name}.json").write_text(json.dumps(settings))
        model = zoo.get("resnet32_cifar", norm="inplace", activation="leaky_relu", num_classes=2)
        torch.save({"state_dict": model.state_dict()}, root / f"{name}.pth")
    return root


TRAIN, SCORE = "train {} -j 0 --log-dir log", "validate a.json data -j 0 --weights {}"
DIFFERENCES = {
    "setting": (("a.json data", "b.json data"), TRAIN, "rank 1: optimizer.learning_rate = 0.5, not 0.01 as on rank 0"),
    "images": (("a.json data", "a.json less"), TRAIN, "rank 1: val.images = 3, not 4 as on rank 0"),
    "weights": (("a.pth", "b.pth"), SCORE, "rank 1: weights = "),
    "limit": (("a.pth --limit 2", "a.pth --limit 4"), SCORE, "rank 1: val.images = 4, not 2 as on rank 0"),
    "unusable folder": (("a.json data",) * 2, f"{TRAIN[:-3]}used", "the folder holds an earlier run"),
}


@pytest.mark.parametrize(("words", "command", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_difference_between_ranks_fails_on_every_rank(
    words: tuple[str, str], command: str, message: str, folder: Path
) -> None:
    commands = [command.format(own).split() for own in words]
    for code, printed, seconds in run_distributed(_command_on_rank, 2, commands, str(folder), group=False):
        assert code == 2
        assert message in printed
        assert seconds < END_S
    assert not (folder / "log").exists()


def _die(path: Path) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_raises(
    tmp_path: Path, finished: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.data.sources.folder.read_bytes", _die)
    command = ["train", str(finished.config), str(finished.data), "-j", "1", "--log-dir", str(tmp_path / "log")]
    assert main(command) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("zoo train: a data loader worker died (DataLoader worker (pid")
    assert "fewer workers" in last


def test_worker_killed_during_save_does_not_blame_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises the error from a signal handler, in the main thread, which waits for the write or its thread."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    was_killed = threading.Event()

    def report(*args: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. ")

    def interrupted(*args: Any) -> None:
        while sys._current_frames()[main_thread].f_code.co_name != "wait":  # both wait with Condition.wait
            time.sleep(0.001)
        signal.pthread_kill(main_thread, signal.SIGUSR1)
        was_killed.set()
        time.sleep(0.1)
        write_file(*args)

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        was_killed.wait(0.3)

    write_file, start = torch.save, threading.Thread.start
    monkeypatch.setattr("torch.save", interrupted)
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    state = new_state()
    former = signal.signal(signal.SIGUSR1, report)
    try:
        with pytest.raises(ZooError, match="a data loader worker died") as error, shorten_worker_errors():
            save(state, tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert not isinstance(error.value, CheckpointError)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    read(tmp_path / CHECKPOINT)


UNGUARDED = """
import multiprocessing, sys
multiprocessing.set_start_method(sys.argv[1], force=True)

import torch
import zoo

class Items(list):
    classes = ["ant", "bee"]

{main}
"""
TRAINING = """
    settings = {"optimizer": {"batch_size": 4}, "input": {"crop_train": 8}}
    items = Items((torch.zeros(3, 8, 8), index % 2) for index in range(8))
    zoo.train("resnet32_cifar", items, log_dir=sys.argv[2], epochs=1, workers=1, experiment=settings)
"""


GUARD = 'if __name__ == "__main__":'
GUARDED = f"{GUARD}{TRAINING}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "main", "words"),
    [
        ("spawn", f"if True:{TRAINING}", f"call zoo.train or zoo.score below {GUARD}"),
        ("forkserver", f"if True:{TRAINING}", f"call zoo.train or zoo.score below {GUARD}"),
        ("spawn", GUARDED.replace("items, ", "Items([lambda: 0] * 8), "), "the data set cannot be sent to a worker"),
        ("spawn", GUARDED, ""),
    ],
    ids=["spawn", "forkserver", "lambda", "right"],
)
def test_script_error_explains_start_method(tmp_path: Path, method: str, main: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(main=main))
    command = [sys.executable, str(script), method, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is (not words)
    errors = [line for line in done.stderr.splitlines() if line.startswith("zoo.errors.")]  # also of the worker
    assert bool(errors) is bool(words)
    if words:
        assert words in errors[-1]
        assert "memory" not in errors[-1]
