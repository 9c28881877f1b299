"""The metrics file holds whole JSON lines only, whatever happened to the process before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from zoo.report.jsonlines import JsonLines


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_second_run_appends_to_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for event in ("start", "resume"):
        lines = JsonLines(path)
        lines.write(event, step=3)
        lines.close()
    assert [(record["event"], record["step"]) for record in _records(path)] == [("start", 3), ("resume", 3)]


def test_each_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write("train", loss=1.5)
    assert _records(tmp_path / "metrics.jsonl")[0]["loss"] == 1.5
    lines.close()


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write("train", loss=math.nan, top1=math.inf, errors={"block": math.nan, "next": 1.0})
    lines.close()
    record = _records(tmp_path / "metrics.jsonl")[0]
    assert (record["loss"], record["top1"]) == (None, None)
    assert record["errors"] == {"block": None, "next": 1.0}


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start"}\n{"event": "tra')
    lines = JsonLines(path)
    lines.write("resume")
    lines.close()
    assert [record["event"] for record in _records(path)] == ["start", "resume"]
