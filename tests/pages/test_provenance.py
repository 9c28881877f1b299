"""Result files state where they come from, and what is generated from them is up to date."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages.provenance import find_faults
from tests.pages.tables import RESULTS
from zoo.benchmark.results import Case, Results
from zoo.cli import build_parser
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import Scoreboard
from zoo.reproduce.scoreboard_files import write_scoreboard

ENVIRONMENT = {"commit": "0" * 40, "date": "2026-01-02T03:04:05+00:00", "torch": "2.11"}
CONTENT = {"benchmark": "quickstart", "command": "zoo quickstart", "environment": ENVIRONMENT}


def faults_of(folder: Path, content: Any) -> list[str]:
    (folder / "a.json").write_text(json.dumps(content))
    return find_faults(folder)


def test_the_committed_results_are_without_fault() -> None:
    assert len(list(RESULTS.glob("*.json"))) > 10
    assert find_faults(RESULTS) == []


def test_commands_that_verdicts_recommend_are_valid() -> None:
    rows = json.loads((RESULTS / "reproduction.json").read_text())["rows"]
    commands = {command for row in rows for command in re.findall(r"`(zoo [^`]*)`", row["verdict"])}
    assert len(commands) > 10
    parser = build_parser()
    for command in commands:
        assert isinstance(parser.parse_args(shlex.split(command)[1:]), argparse.Namespace)


def test_a_file_that_names_its_origin_has_no_fault(tmp_path: Path) -> None:
    assert faults_of(tmp_path, CONTENT) == []
    of_machine = {"command": "zoo", "machine": {"cpu": "a"}, "versions": {"torch": "2.11"}, "commit": "0" * 40}
    assert faults_of(tmp_path, of_machine) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"environment": ENVIRONMENT | {"commit": "0" * 40 + "-dirty"}}, "is not a clean commit"),
        ({"environment": ENVIRONMENT | {"commit": "0" * 40 + ", main"}}, "'main' is not a clean commit"),
        ({"environment": {"commit": None, "torch": "2.11"}}, "names no commit"),
        ({"runs": [{"environment": {"commit": "abc-dirty"}}]}, "'abc-dirty' is not a clean commit"),
        ({"command": None}, "names no command"),
        ({"environment": {}, "commit": "0" * 40}, "names no machine and versions"),
    ],
)
def test_a_file_without_its_origin_has_a_fault(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    (found,) = faults_of(tmp_path, CONTENT | changes)
    assert found.startswith("a.json: ")
    assert fault in found


def test_a_text_that_is_not_generated_from_its_numbers_is_a_fault(tmp_path: Path) -> None:
    results = Results("layer", "zoo benchmark layer", torch.device("cpu"), {})
    results.add(Case("norm", (2, 3), "float32", "contiguous"), "native", "time", "ms", [1.0, 2.0])
    text = results.write(tmp_path / "a")
    fault = "a.json: a.md is not up to date"
    assert fault not in find_faults(tmp_path)
    (tmp_path / "a.md").write_text(text.replace("1.5", "1.4"))
    assert fault in find_faults(tmp_path)
    (tmp_path / "a.md").unlink()
    assert fault in find_faults(tmp_path)


def test_the_files_of_the_scoreboard_are_generated_and_its_measured_rows_have_an_origin(tmp_path: Path) -> None:
    rows = list(Scoreboard(PAPERS, {}).rows.values())
    write_scoreboard(tmp_path, rows, "zoo reproduce all", ENVIRONMENT)
    assert find_faults(tmp_path) == []
    rows[0] = rows[0].model_copy(update={"measured": 1.0})
    write_scoreboard(tmp_path, rows, "zoo reproduce all", ENVIRONMENT)
    (tmp_path / "reproduction.csv").write_text("")
    assert find_faults(tmp_path) == [
        f"reproduction.json: row {rows[0].id} was measured, but has no commit or no date",
        "reproduction.json: reproduction.csv is not up to date",
    ]
