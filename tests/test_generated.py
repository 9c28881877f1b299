"""The command that generates files writes and prints only changed files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generated import print_changes, write_changed


def test_only_changed_files_are_written_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    paths[1].write_text("same")
    print_changes(write_changed(dict.fromkeys(paths, "same")))
    assert capsys.readouterr().out == f"{paths[0]}\n"
    print_changes(write_changed(dict.fromkeys(paths, "same")))
    assert capsys.readouterr().out == "nothing changed\n"
