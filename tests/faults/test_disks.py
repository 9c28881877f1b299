"""Disks that are full, read-only or gone: one line that says so, and what was safe before stays so.

The disks are real ones, in memory. Each test has a mount namespace of its own in a process of its own, which is not
permitted everywhere. A full disk for those who may not mount is in tests/engine/test_checkpoint.py, in
tests/faults/test_log_folder.py and in tests/weights/test_fetch.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.spawn import run_distributed
from tests.engine.tiny import differences, make_images
from tests.faults.test_kills import SETTINGS
from tests.weights.server import Server
from zoo.cli import main
from zoo.engine.checkpoint import CHECKPOINT, PREVIOUS, read
from zoo.weights.published import published

NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
NAME = "resnet34_ipabn-sync_lr_512"
CHECKPOINT_MB = 6  # of the network of SETTINGS


def _may_mount() -> str | None:
    """Return why disks cannot be mounted in a process of one's own, None if they can."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    script = "mount -t tmpfs -o size=1m none /mnt"
    answer = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    return None if answer.returncode == 0 else f"disks cannot be mounted here: {answer.stderr.strip()}"


pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.dist,
    pytest.mark.skipif((why := _may_mount()) is not None, reason=str(why)),
]


def _mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def _fill(folder: Path, left_bytes: int = 0) -> None:
    """Leave only so many bytes free on the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    (folder / "filling").write_bytes(bytes(max(0, free - left_bytes)))


def _in_own_namespace(function: Callable[..., Any], *args: Any) -> Any:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    return function(*args)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` of a process whose mounts nobody else sees."""
    (result,) = run_distributed(_in_own_namespace, 1, function, *args, group=False)
    return result


def _zoo(*command: object) -> tuple[int, str]:
    """Return the exit code of a command and what it printed on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
        code = main([str(word) for word in command])
    return code, printed.getvalue()


def _train(folder: Path, log_dir: Path, *options: str) -> tuple[int, str]:
    return _zoo("train", folder / "tiny.json", folder / "data", "--log-dir", log_dir, "-j", "0", *options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with images, settings, and an empty folder to mount on."""
    make_images(tmp_path / "data", num_train=40, num_val=6)
    (tmp_path / "tiny.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "disk").mkdir()
    return tmp_path


def _train_on_a_full_disk(folder: Path, num_checkpoints: float) -> tuple[list[tuple[int, str]], dict[str, Any]]:
    log_dir = folder / "disk" / "log"
    _mount(folder / "disk", f"size={int(1024 * num_checkpoints * CHECKPOINT_MB)}k")
    answers = [_train(folder, log_dir)]
    intact = [read(log_dir / name)["position"] for name in (CHECKPOINT, PREVIOUS) if (log_dir / name).exists()]
    temporary = list(log_dir.glob(".*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=200m", str(folder / "disk")], check=True)
    answers.append(_train(folder, log_dir, "--resume", "auto"))
    end = {"intact": intact, "temporary": temporary, "content": read(log_dir / CHECKPOINT)}
    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    return answers, {**end, "records": [json.loads(line) for line in lines]}


@pytest.mark.parametrize("num_checkpoints", [0.1, 0.9, 1.5, 2.9])
def test_a_full_disk_stops_a_run_which_goes_on_where_it_was_once_there_is_room(
    num_checkpoints: float, folder: Path
) -> None:
    """As many checkpoints as fit are written; the log shares their disk."""
    assert _train(folder, folder / "straight")[0] == 0
    ((code, printed), (second, _)), end = alone(_train_on_a_full_disk, folder, num_checkpoints)
    assert (code, second) == (2, 0)
    assert "No space left on device" in printed or "cannot be written" in printed
    assert "Traceback" not in printed
    assert len(end["intact"]) == int(num_checkpoints)
    assert end["temporary"] == []
    assert differences(end["content"], read(folder / "straight" / CHECKPOINT)) == []


def _train_on_a_read_only_disk(folder: Path, *options: str) -> tuple[int, str]:
    _mount(folder / "disk", "ro")
    return _train(folder, folder / "disk" / "log", *options)


def _resume_on_a_disk_that_became_read_only(folder: Path) -> tuple[int, str]:
    _mount(folder / "disk", "size=100m")
    log_dir = folder / "disk" / "log"
    assert _train(folder, log_dir)[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(folder / "disk")], check=True)
    return _train(folder, log_dir, "--resume", "auto")


@pytest.mark.parametrize("function", [_train_on_a_read_only_disk, _resume_on_a_disk_that_became_read_only])
def test_a_read_only_log_folder_is_one_line(function: Any, folder: Path) -> None:
    code, printed = alone(function, folder)
    assert code == 2
    assert "Read-only file system" in printed.splitlines()[-1]
    assert "Traceback" not in printed


def _train_until_the_folder_is_gone(folder: Path) -> tuple[int, str, str]:
    import zoo.engine.loop as loop

    log_dir, calls, step = folder / "log", [], loop.train_step

    def remove_at_step_3(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            shutil.rmtree(log_dir)
        step(*args)

    loop.train_step = remove_at_step_3  # type: ignore[assignment]
    code, printed = _train(folder, log_dir)
    return code, printed, "" if log_dir.exists() else "gone"


def test_a_log_folder_that_disappears_is_one_line(folder: Path) -> None:
    code, printed, _ = alone(_train_until_the_folder_is_gone, folder)
    assert code == 2
    assert "the checkpoint cannot be written" in printed.splitlines()[-1]
    assert "Traceback" not in printed


def _fetch(folder: Path, disk: str) -> tuple[list[tuple[int, str]], list[str]]:
    content = b"PK\x03\x04" + bytes(range(256)) * 4000
    published()[NAME].md5 = hashlib.md5(content).hexdigest()
    cache = folder / "disk" / "cache"
    os.environ.update(ZOO_CACHE=str(cache), NO_PROXY="*")
    os.environ.pop("ZOO_OFFLINE", None)
    if disk == "full":
        _mount(folder / "disk", "size=2m")
        _fill(folder / "disk", 500_000)
    elif disk == "read-only":
        _mount(folder / "disk", "ro")
    else:
        (folder / "disk").rmdir()
        (folder / "disk").touch()
    answers = []
    with Server(content) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["ZOO_WEIGHTS_URL"] = server.url
        answers.append(_zoo("fetch", NAME))
        files = sorted(path.name for path in cache.rglob("*") if path.is_file()) if cache.is_dir() else []
        if disk == "full":
            (folder / "disk" / "filling").unlink()
            answers.append(_zoo("fetch", NAME))
        server.shutdown()
    return answers, files


@pytest.mark.parametrize("disk", ["full", "read-only", "missing"])
def test_a_cache_that_cannot_be_written_is_one_line_and_leaves_no_file_that_looks_whole(
    disk: str, folder: Path
) -> None:
    ((code, printed), *rest), files = alone(_fetch, folder, disk)
    assert code == 2
    assert "the weights cannot be written" in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert f"{NAME}.pth.tar" not in files
    assert [second for second, _ in rest] == [0] * (disk == "full")


def _unpack(folder: Path, options: str) -> tuple[tuple[int, str], list[str]]:
    os.environ["ZOO_CACHE"] = str(folder / "disk" / "cache")
    os.chdir(folder)
    _mount(folder / "disk", options)
    return _zoo("quickstart"), [path.name for path in (folder / "disk").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("options", "why"), [("size=500k", "No space left"), ("ro", "Read-only file system")])
def test_a_cache_without_room_for_the_bundled_images_is_one_line_and_stays_empty(
    options: str, why: str, folder: Path
) -> None:
    (code, printed), files = alone(_unpack, folder, options)
    assert code == 2
    assert why in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert files == []
