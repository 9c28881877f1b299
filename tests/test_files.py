"""Files are whole or not there."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import pytest

from zoo import files
from zoo.files import remove_leftovers, replacing, write_bytes, write_json


def test_the_file_and_its_folder_are_made_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "result.json", {"top1": 1.5})
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == {"top1": 1.5}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result.json"]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": math.nan})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("no space left")

    path = tmp_path / "grid.png"
    path.write_bytes(b"old")
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_another_process_is_about_to_remove_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remove_leftovers` may lock a new file before the process that created it does."""
    removing: dict[Path, IO[bytes]] = {}

    def lock_first(path: Path, mode: str) -> IO[bytes]:
        opened = open(path, mode)  # noqa: SIM115
        if not removing:
            removing[path] = open(path, "r+b")  # noqa: SIM115
            fcntl.flock(removing[path], fcntl.LOCK_EX)
        return opened

    monkeypatch.setattr(Path, "open", lock_first)
    monkeypatch.setattr(files, "_swept_folders", {tmp_path})
    with replacing(tmp_path / "result.json") as temporary:
        for path, file in removing.items():
            path.unlink()
            file.close()
        assert temporary.exists()
        temporary.write_bytes(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def _hold_temporary(path: Path, connection: Connection) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(b"a part")
        connection.send(temporary.name)
        time.sleep(600)


def test_the_next_process_removes_what_a_killed_one_has_left_and_nothing_that_is_being_written(tmp_path: Path) -> None:
    path, ours, theirs = tmp_path / "result.json", *multiprocessing.Pipe()
    writers = [multiprocessing.get_context("fork").Process(target=_hold_temporary, args=(path, theirs)) for _ in "ab"]
    names = []
    for writer in writers:
        writer.start()
        names.append(ours.recv())
    (tmp_path / ".notes.tmp").touch()  # not one of ours
    writers[0].kill()
    writers[0].join()
    try:
        remove_leftovers(tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted([names[1], ".notes.tmp"])
    finally:
        writers[1].kill()
        writers[1].join()
    files._swept_folders.clear()  # as in a new process
    write_bytes(path, b"new")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".notes.tmp", path.name]
