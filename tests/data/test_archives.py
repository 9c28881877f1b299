"""Archives are checked before anything of them is used, and a folder is complete or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.data.distributed import md5_of, write_tar
from zoo.data.prepare import archives
from zoo.data.prepare.archives import check_md5, read_all, read_members
from zoo.data.prepare.output import complete_folder
from zoo.errors import DataError


def test_another_file_is_refused_with_both_digests(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"another")
    with pytest.raises(DataError, match=rf"{md5_of(b'another')}, not {md5_of(b'wanted')}.*data.bin"):
        check_md5(tmp_path / "data.bin", md5_of(b"wanted"))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        check_md5(tmp_path / "missing", md5_of(b"wanted"))


def test_wanted_files_of_an_archive_are_read_and_nothing_is_unpacked(tmp_path: Path) -> None:
    files = {"../outside": b"1", "/tmp/absolute": b"2", "a/wanted": b"3"}
    write_tar(tmp_path / "a.tar", files, "w", links={"a/link": "/etc/passwd"})
    assert dict(read_members(tmp_path / "a.tar", lambda name: True)) == files
    assert read_all(tmp_path / "a.tar", ["a/wanted"]) == {"a/wanted": b"3"}
    assert os.listdir(tmp_path) == ["a.tar"]


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


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with complete_folder(target) as folder:
        (folder / "a").touch()
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "a").exists()


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


def test_the_folder_that_one_is_in_is_filled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with complete_folder(Path(".")) as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()
