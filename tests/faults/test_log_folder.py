"""A log folder belongs to one run at a time and is never replaced; its faults are errors of one line."""

from __future__ import annotations

import errno
import json
import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.cli.conftest import SETTINGS, Run
from tests.faults.fuzz import limit_resource
from zoo.cli import main
from zoo.config.parse import load_experiment
from zoo.files import file_lock
from zoo.run.run_log import RunLog


@pytest.fixture
def log_dir(finished: Run, tmp_path: Path) -> Path:
    """A copy of the folder of a finished run."""
    return Path(shutil.copytree(finished.log_dir, tmp_path / "log"))


def _train(run: Run, log_dir: Path, *options: str) -> int:
    return main(["train", str(run.config), str(run.data), "--log-dir", str(log_dir), "-j", "0", *options])


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and time of each file but the lock file, which is opened by whoever asks for the lock."""
    return {
        path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir() if path.name != ".lock"
    }


def test_second_run_in_folder_fails(finished: Run, log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(log_dir / ".lock"):
        before = _states(log_dir)
        assert _train(finished, log_dir, "--resume", "auto") == 2
        assert f"{log_dir}: another run is training in this folder; wait for it" in capsys.readouterr().err
        assert _states(log_dir) == before
    assert _train(finished, log_dir, "--resume", "auto") == 0


@pytest.mark.parametrize(("lock", "flush"), [("ENOLCK", "EINVAL"), ("EOPNOTSUPP", "ENOSYS"), ("ENOSYS", "EOPNOTSUPP")])
def test_run_on_file_system_without_locks_and_flushes_is_complete(
    finished: Run,
    tmp_path: Path,
    lock: str,
    flush: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(name: str) -> Callable[..., None]:
        def fail(*args: object) -> None:
            raise OSError(getattr(errno, name), name)

        return fail

    monkeypatch.setattr("fcntl.flock", failing(lock))
    monkeypatch.setattr("os.fsync", failing(flush))
    assert _train(finished, tmp_path / "log") == 0
    with file_lock(tmp_path / "log" / ".lock"):
        assert _train(finished, tmp_path / "log", "--resume", "auto") == 2
        assert "another run is training in this folder" in capsys.readouterr().err
    assert _train(finished, tmp_path / "log", "--resume", "auto") == 0


def test_folder_with_run_is_not_replaced(finished: Run, log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _states(log_dir)
    for options in ([], ["--resume", str(finished.checkpoint)]):  # a checkpoint of another folder
        assert _train(finished, log_dir, *options) == 2
        message = capsys.readouterr().err
        assert all(way in message for way in ("--resume auto", "remove the folder", "--log-dir", "checkpoint.pth.tar"))
    assert _states(log_dir) == before


@pytest.mark.parametrize(
    "in_the_way", ["log", "log/metrics.jsonl/", "log/training_0.log/", "log/.lock/", "log/experiment.json/", "nowhere"]
)
def test_unwritable_folder_fails_in_one_line(
    finished: Run, tmp_path: Path, in_the_way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "log"
    if in_the_way.endswith("/"):
        (tmp_path / in_the_way).mkdir(parents=True)
    elif in_the_way == "nowhere":
        target = tmp_path / "file" / "log"
        (tmp_path / "file").touch()
    else:
        target.touch()
    assert _train(finished, target) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "the log cannot be written" in message
    assert "--log-dir" in message
    assert str(target) in message or str(tmp_path / in_the_way) in message


def test_resumed_run_removes_leftovers_of_killed_save(finished: Run, log_dir: Path) -> None:
    for name in ("checkpoint.pth.tar", "model_best.pth.tar"):
        (log_dir / f".{name}.0123456789abcdef.tmp").write_bytes(b"a part")
    assert _train(finished, log_dir, "--resume", "auto", "--epochs", "3") == 0
    assert list(log_dir.glob(".*.tmp")) == []


def test_temporarily_full_disk_leaves_complete_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("zoo").setLevel(logging.INFO)
    config = load_experiment("quickstart_fashion_mnist")
    with RunLog(tmp_path, 0, config) as log:
        log.record("gradient_angle", step=1, degrees=0.5)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with limit_resource(resource.RLIMIT_FSIZE, size + 10):  # ten bytes of the next record fit
            for step in range(2, 50):
                log.record("gradient_angle", step=step, degrees=0.5)
                logging.getLogger("zoo").info("a line" * 10)
        log.record("gradient_angle", step=50, degrees=0.25)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 50]
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_data_path_leaves_no_file_anywhere(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(finished.config), "nowhere"]) == 2
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({**SETTINGS, "network": {"arch": "resnet19", "classes": 2}}))
    assert main(["train", str(bad), str(finished.data), "-j", "0"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]
    assert "resnet19" in capsys.readouterr().err
