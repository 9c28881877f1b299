"""``zoo results check`` prints what is wrong with files of results, and its exit code says whether anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo.cli import main
from zoo.reproduce.stored_results import Findings


def test_faults_and_remarks_are_printed_and_faults_alone_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"commit": "1" * 40, "date": "2026-01-02"}
    content = {"benchmark": "quickstart", "command": "zoo quickstart", "environment": environment}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert main(["results", "check", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("remark: a.json: commit 1111111111 is not known here")
    assert lines[1] == "1 files of results, 0 faults"
    (tmp_path / "b.json").write_text("{}")
    assert main(["results", "check", str(tmp_path)]) == 3
    captured = capsys.readouterr()
    assert "fault: b.json: it names no command" in captured.out
    assert "faults, listed above" in captured.err
    (tmp_path / "c.json").write_text('{"command": "zoo list", "environment": {"commit": "1"}, "rows": [1]}')
    assert main(["results", "check", str(tmp_path)]) == 3
    assert "fault: c.json: it cannot be read" in capsys.readouterr().out


def test_what_out_of_date_means_for_the_pages_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remarks = [f"{name}.json: out of date: 2 files that it depends on have changed" for name in "ab"]
    monkeypatch.setattr("zoo.reproduce.stored_results.check_results", lambda *_: Findings(2, [], remarks))
    assert main(["results", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("The README and docs show them as measured on that commit") == 1


def test_a_folder_that_is_not_there_is_a_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", "check", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
