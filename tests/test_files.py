"""Files are whole or not there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zoo.config.parse import load_experiment
from zoo.errors import ZooError
from zoo.files import remove_leftovers, replacing, write_bytes, write_json
from zoo.weights.cache import md5_of


def test_only_file_and_its_folder_are_created(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "result.json", {"top1": 1.5})
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == {"top1": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "new" / "result.json", {"top1": math.nan})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]


def test_full_disk_leaves_old_file_and_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("no space left")

    path = tmp_path / "grid.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_partial_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "result.json") as temporary:
        temporary.rename(tmp_path / f".result.json.{'0' * 16}.tmp")
    for other in (".notes.tmp", "result.json", ".other.json.0123.tmp"):
        (tmp_path / other).touch()
    remove_leftovers(tmp_path / "result.json")
    assert {path.name for path in tmp_path.iterdir()} == {".notes.tmp", "result.json", ".other.json.0123.tmp"}


@pytest.mark.parametrize("read", [load_experiment, md5_of])
def test_fifo_raises(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "fifo.json"
    os.mkfifo(path)
    with pytest.raises(ZooError, match=r"fifo.json: .*it is a FIFO, a socket or a device"):
        read(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_experiment_is_read_in_encodings_of_editors(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "tiny.json"
    path.write_bytes('{\r\n"network": {"arch": "resnet18"}}\r\n'.encode(encoding))
    assert load_experiment(path).network.arch == "resnet18"
