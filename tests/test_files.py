"""Files are written completely or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

import zoo
from tests.refusals import refused
from zoo.cli import main
from zoo.config.parse import load_experiment
from zoo.data.dataset import open_source
from zoo.data.named import open_data
from zoo.data.sources.location import parse_data_path
from zoo.errors import ConfigError, ZooError
from zoo.files import cache_dir, file_lock, flush_folder, remove_leftovers, replace_file, write_bytes, write_json
from zoo.weights._cache import md5_of


def test_only_file_and_its_folder_are_created(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "result.json", {"top1": 1.5})
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == {"top1": 1.5}
    refused(ValueError, lambda: write_json(tmp_path / "new" / "result.json", {"top1": math.nan}), "JSON")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]


def test_full_disk_leaves_old_file_and_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("no space left")

    path = tmp_path / "grid.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    refused(OSError, lambda: write_bytes(path, b"new"), "no space left")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_partial_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replace_file(tmp_path / "result.json") as temporary:
        temporary.rename(tmp_path / f".result.json.{'0' * 16}.tmp")
    for other in (".notes.tmp", "result.json", ".other.json.0123.tmp"):
        (tmp_path / other).touch()
    remove_leftovers(tmp_path / "result.json")
    assert {path.name for path in tmp_path.iterdir()} == {".notes.tmp", "result.json", ".other.json.0123.tmp"}


@pytest.mark.parametrize("read", [load_experiment, md5_of])
def test_fifo_raises(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "fifo.json"
    os.mkfifo(path)
    refused(ZooError, lambda: read(path), "fifo.json: ", "FIFO")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_experiment_is_read_in_encodings_of_editors(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "tiny.json"
    path.write_bytes('{\r\n"network": {"arch": "resnet18"}}\r\n'.encode(encoding))
    assert load_experiment(path).network.arch == "resnet18"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without home folder in HOME and in the password database."""

    def fail(_: str) -> Any:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("ZOO_CACHE", raising=False)
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", fail)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    "call",
    [
        lambda: cache_dir(),
        lambda: zoo.get("resnet34_ipabn-sync_lr_512", pretrained=True),
        lambda: zoo.weights.fetch_weights("resnet34_ipabn-sync_lr_512"),
        lambda: open_data(parse_data_path("torchvision:CIFAR10")),
        lambda: open_source(parse_data_path("http://127.0.0.1:9/shards")),
    ],
)
def test_user_without_home_folder_gets_one_line(call: Callable[[], object]) -> None:
    assert "\n" not in refused(ConfigError, call, "ZOO_CACHE")


@pytest.mark.usefixtures("homeless")
def test_doctor_and_own_folder_need_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "ZOO_CACHE" in capsys.readouterr().out
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path


def _fails(number: int) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_file_system_that_cannot_flush_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("os.fsync", _fails(number))
    write_bytes(tmp_path / "a", b"new")
    flush_folder(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failed_flush_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("os.fsync", _fails(number))
    for flush in (partial(write_bytes, tmp_path / "a", b"new"), partial(flush_folder, tmp_path)):
        refused(OSError, flush, os.strerror(number))


NO_LOCKS = [None, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.mark.parametrize("number", NO_LOCKS)
@pytest.mark.parametrize("exists", [False, True])
def test_lock_is_exclusive_on_every_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int | None, exists: bool
) -> None:
    path = tmp_path / "lock"
    if exists:
        path.touch()
    if number is not None:
        monkeypatch.setattr("fcntl.flock", _fails(number))
    for _ in range(2):  # it can be held again
        with file_lock(path):
            with pytest.raises(Timeout), file_lock(path, timeout_s=0):
                pass
            with file_lock(tmp_path / "other"):
                pass
    assert ("lock.soft" in caplog.text) is (number is not None)
    assert not list(tmp_path.glob("*.soft"))


LEAVE = """
import fcntl, os, pathlib, sys
from zoo.files import file_lock

def fail(*args):
    raise OSError(37, "No locks available")

fcntl.flock = fail
with file_lock(pathlib.Path(sys.argv[1])):
    os._exit(0)
"""


@pytest.mark.dist
def test_lock_of_killed_process_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path / "lock")], check=True, timeout=60)
    assert (tmp_path / "lock.soft").exists()
    monkeypatch.setattr("fcntl.flock", _fails(errno.ENOLCK))
    with file_lock(tmp_path / "lock", timeout_s=20):
        pass


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_lock_error_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("fcntl.flock", _fails(number) if number == errno.EIO else lambda *args: None)
    path = tmp_path / "lock"
    if number == errno.EACCES:
        path.mkdir()
    refused(OSError, file_lock(path).__enter__, "lock" if number == errno.EACCES else os.strerror(number))
    assert not list(tmp_path.glob("*.soft"))


def test_every_lock_is_a_file_lock() -> None:
    """`zoo.files.file_lock` is the only place that knows of file systems without locks."""
    users = [path.name for path in Path("zoo").rglob("*.py") if "FileLock" in path.read_text(encoding="utf-8")]
    assert users == ["files.py"]
