"""Result files state their origin, and texts generated from them are up to date."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.tables import RESULTS
from tests.pages.provenance import find_faults
from zoo.benchmark.results import Case, Results
from zoo.cli import build_parser
from zoo.reproduce.scoreboard_files import read_rows

COMMIT = "0" * 40
ENVIRONMENT = {"commit": COMMIT, "date": "2026-01-02T03:04:05+00:00", "torch": "2.11", "cpu": "A 1"}
CONTENT = {"benchmark": "quickstart", "command": "zoo quickstart", "environment": ENVIRONMENT, "cost": {"seconds": 1}}


@pytest.fixture
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the repository have the commit of `CONTENT`, and no other."""
    known = {COMMIT: "2026-01-02T03:00:00+00:00"}
    monkeypatch.setattr("tests.pages.provenance.commit_dates", lambda: known)


def faults_of(folder: Path, content: Any) -> list[str]:
    (folder / "a.json").write_text(json.dumps(content))
    return find_faults(folder)


def test_committed_results_have_no_faults() -> None:
    assert len(list(RESULTS.glob("*.json"))) > 10
    assert find_faults(RESULTS) == []


def test_recommended_commands_are_valid() -> None:
    reasons = [row.farthest.reason for row in read_rows(RESULTS)]
    commands = {command for reason in reasons for command in re.findall(r"`(zoo [^`]*)`", reason)}
    assert len(commands) > 10
    parser = build_parser()
    for command in commands:
        assert isinstance(parser.parse_args(shlex.split(command)[1:]), argparse.Namespace)


@pytest.mark.usefixtures("one_commit")
def test_file_with_origin_has_no_fault(tmp_path: Path) -> None:
    assert faults_of(tmp_path, CONTENT) == []
    of_machine = {"command": "zoo", "machine": {"cpu": "A 1"}, "versions": {"torch": "2.11"}, "cost": {"seconds": 1}}
    of_machine |= {"commit": COMMIT, "date": "2026-01-03T00:00:00+00:00"}
    assert faults_of(tmp_path, of_machine) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"environment": ENVIRONMENT | {"commit": "0" * 40 + "-dirty"}}, "is not a clean commit"),
        ({"environment": ENVIRONMENT | {"commit": "0" * 40 + ", main"}}, "'main' is not a clean commit"),
        ({"environment": ENVIRONMENT | {"commit": None}}, "names no commit"),
        ({"environment": ENVIRONMENT | {"commit": "1" * 40}}, "is not a commit of this repository"),
        ({"environment": ENVIRONMENT | {"date": None}}, "names no date"),
        ({"environment": ENVIRONMENT | {"date": "2026-01-02T02:59:59+00:00"}}, "before its commit of 2026-01-02T03:00"),
        ({"runs": [{"environment": {"commit": "abc-dirty"}}]}, "'abc-dirty' is not a clean commit"),
        ({"command": None}, "names no command"),
        (
            {"environment": {}, "machine": {"cpu": "A 1"}, "commit": COMMIT, "date": ENVIRONMENT["date"]},
            "names no machine and versions",
        ),
    ],
)
@pytest.mark.usefixtures("one_commit")
def test_file_without_origin_has_fault(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    (found,) = faults_of(tmp_path, CONTENT | changes)
    assert found.startswith("a.json: ")
    assert fault in found


def test_text_not_generated_from_its_numbers_is_fault(tmp_path: Path) -> None:
    results = Results("layer", "zoo benchmark layer", torch.device("cpu"), {})
    results.add(Case("norm", (2, 3), "float32", "contiguous"), "native", "time", "ms", [1.0, 2.0])
    text = results.write(tmp_path / "a")
    fault = "a.json: a.md is not up to date"
    assert fault not in find_faults(tmp_path)
    (tmp_path / "a.md").write_text(text.replace("1.5", "1.4"))
    assert fault in find_faults(tmp_path)
    (tmp_path / "a.md").unlink()
    assert fault in find_faults(tmp_path)
