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

from tests.cli.conftest import SETTINGS, Run
from tests.dist.spawn import run_distributed
from tests.engine.tiny import build_net, make_config, make_images, save, this_process
from zoo.cli import main
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.process import shorten_worker_errors
from zoo.engine.state import build_state
from zoo.errors import CheckpointError, ZooError
from zoo.tasks import task_of

pytestmark = pytest.mark.dist

END_S = 30.0  # Gloo itself would wait for half an hour


def _command_on_rank(commands: list[list[str]], folder: str) -> tuple[int, str, float]:
    """Run this rank's command; return its exit code, its stderr, and the seconds it took."""
    os.chdir(folder)
    printed, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(printed):
        code = main(commands[int(os.environ["RANK"])])
    return code, printed.getvalue(), time.monotonic() - start


def _run(commands: list[list[str]], folder: Path) -> list[tuple[int, str, float]]:
    return run_distributed(_command_on_rank, len(commands), commands, str(folder), group=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=16, num_val=4)


def _write_settings(path: Path, **changes: Any) -> str:
    content = json.loads(json.dumps(SETTINGS))
    for section, values in changes.items():
        content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
    path.write_text(json.dumps(content))
    return str(path)


def test_setting_differing_between_ranks_fails_on_every_rank(tmp_path: Path, data: Path) -> None:
    other = _write_settings(tmp_path / "b.json", optimizer={"learning_rate": 0.5})
    files = [_write_settings(tmp_path / "a.json"), other]
    ends = _run([["train", file, str(data), "-j", "0", "--log-dir", "log"] for file in files], tmp_path)
    for code, printed, seconds in ends:
        assert code == 2
        assert "rank 1: optimizer.learning_rate = 0.5, not 0.01 as on rank 0" in printed
        assert seconds < END_S
    assert not (tmp_path / "log").exists()


def _copy_with_an_image_less(data: Path, target: Path) -> Path:
    shutil.copytree(data, target)
    (target / "val/class0/2.png").unlink()
    return target


def test_other_images_on_another_rank_fail_before_training(tmp_path: Path, data: Path) -> None:
    file, other = _write_settings(tmp_path / "a.json"), _copy_with_an_image_less(data, tmp_path / "other")
    ends = _run([["train", file, str(folder), "-j", "0", "--log-dir", "log"] for folder in (data, other)], tmp_path)
    for code, printed, seconds in ends:
        assert code == 2
        assert "rank 1: val.images = 3, not 4 as on rank 0" in printed
        assert seconds < END_S
    assert not (tmp_path / "log").exists()


def test_different_weights_on_ranks_fail(tmp_path: Path, data: Path) -> None:
    file = _write_settings(tmp_path / "a.json")
    for name in ("one", "two"):
        changed = _write_settings(tmp_path / "b.json", seed=len(name) + ord(name[0]))
        assert main(["train", changed, str(data), "-j", "0", "--log-dir", str(tmp_path / name)]) == 0
    files = [str(tmp_path / name / "checkpoint.pth.tar") for name in ("one", "two")]
    for code, printed, _ in _run(
        [["validate", file, str(data), "--weights", path, "-j", "0"] for path in files], tmp_path
    ):
        assert code == 2
        assert "rank 1: weights = " in printed
    limits = [["validate", file, str(data), "--weights", files[0], "-j", "0", "--limit", n] for n in ("2", "4")]
    for code, printed, _ in _run(limits, tmp_path):
        assert code == 2
        assert "rank 1: val.images = 4, not 2 as on rank 0" in printed


def test_all_ranks_fail_together_for_unusable_folder(tmp_path: Path, data: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "model_best.pth.tar").touch()
    command = ["train", _write_settings(tmp_path / "a.json"), str(data), "-j", "0", "--log-dir", "log"]
    for code, printed, _ in _run([command, command], tmp_path):
        assert code == 2
        assert "the folder holds an earlier run" in printed


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
    config = make_config()
    state = build_state(task_of(config), build_net(config.network), this_process())
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
TRAIN = """
    settings = {"optimizer": {"batch_size": 4}, "input": {"crop_train": 8}}
    items = Items((torch.zeros(3, 8, 8), index % 2) for index in range(8))
    zoo.train("resnet32_cifar", items, log_dir=sys.argv[2], epochs=1, workers=1, experiment=settings)
"""


GUARD = 'if __name__ == "__main__":'
GUARDED = f"{GUARD}{TRAIN}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "main", "words"),
    [
        ("spawn", f"if True:{TRAIN}", f"call zoo.train or zoo.score below {GUARD}"),
        ("forkserver", f"if True:{TRAIN}", f"call zoo.train or zoo.score below {GUARD}"),
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
