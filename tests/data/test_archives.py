"""Archives are checked before anything of them is used, and a folder is complete or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.data.distributed import write_tar
from zoo.data.prepare import archives
from zoo.data.prepare.archives import read_all
from zoo.data.prepare.output import complete_folder
from zoo.errors import DataError


def test_a_link_is_not_followed_in_place_of_a_wanted_file(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {}, "w", links={"meta": "/etc/passwd"})
    with pytest.raises(DataError, match=r"the archive does not contain meta; .*a.tar"):
        read_all(tmp_path / "a.tar", ["meta"])


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_damaged_archive_is_one_error(tmp_path: Path, mode: str) -> None:
    write_tar(tmp_path / "a.tar", {"a": os.urandom(20_000)}, mode)
    for damaged in ((tmp_path / "a.tar").read_bytes()[:10_000], b"no archive at all", b""):
        (tmp_path / "b.tar").write_bytes(damaged)
        with pytest.raises(DataError, match=r"the archive (cannot be read|does not contain a)"):
            read_all(tmp_path / "b.tar", ["a"])


def test_a_file_too_large_for_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "a.tar", {"a": bytes(101)})
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 100)
    with pytest.raises(DataError, match=r"a has 101 bytes, more than 100; .*a.tar"):
        read_all(tmp_path / "a.tar", ["a"])


def test_nothing_is_left_of_a_folder_that_could_not_be_completed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), complete_folder(tmp_path / "out"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(DataError, match="cannot be written: No space left on device"),
        complete_folder(tmp_path / "out"),
    ):
        raise OSError(28, "No space left on device")


def test_an_empty_folder_is_filled_and_any_other_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with complete_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    for occupied in (tmp_path / "out", tmp_path / "out" / "a"):
        with pytest.raises(DataError, match="OUT exists and is not overwritten"), complete_folder(occupied):
            raise AssertionError("the block does not begin")


def test_what_a_killed_process_left_is_named_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.unfinished").mkdir()
    with (
        pytest.raises(DataError, match=r"killed before it finished; .*out\.unfinished: remove it"),
        complete_folder(tmp_path / "out"),
    ):
        raise AssertionError("the block does not begin")
    assert (tmp_path / "out.unfinished").exists()
