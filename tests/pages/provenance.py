"""Checks that result files state their provenance and that generated texts are up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from zoo.benchmark.results import markdown
from zoo.reproduce.paper_report import sections_of
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import rows_of
from zoo.reproduce.scoreboard_files import CSV, csv_text
from zoo.run.environment import git

COMMIT = re.compile(r"[0-9a-f]{40}")
# Results that were measured before dates were recorded.
WITHOUT_DATE = ("pareto_resnet50", "pareto_resnext101")


def find_faults(folder: Path) -> list[str]:
    """Return a line for each fault of the JSON files of ``folder``, and of the files generated from them."""
    faults = [f"{path.name}: {fault}" for path in sorted(folder.glob("*.json")) for fault in _faults(path)]
    for name, text in generated_from_reports(folder).items():
        faults += _differences(folder / name, text)
    return faults


def generated_from(path: Path) -> Mapping[str, str]:
    """Return the text files that are generated from a result file, as contents by file name."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {f"{path.stem}.md": markdown(content)} if "records" in content else {}


def generated_from_reports(folder: Path) -> Mapping[str, str]:
    """Return the text files that are generated from all reports of ``folder``; none if a report is missing."""
    paths = {paper: folder / f"{paper}.json" for paper in PAPERS}
    if not all(path.exists() for path in paths.values()):
        return {}
    reports = {paper: sections_of(paper, json.loads(path.read_text())) for paper, path in paths.items()}
    return {CSV: csv_text(rows_of(reports))}


@cache
def commit_dates() -> dict[str, str]:
    """Return the dates of all commits that lead to the present one, in ISO 8601; empty if they are not all known."""
    if (git("rev-parse", "--is-shallow-repository") or "").strip() != "false":
        return {}
    return dict(line.split(" ", 1) for line in (git("log", "--format=%H %cI") or "").splitlines())


def _of_run(content: Mapping[str, Any], key: str) -> Any:
    return (content.get("environment") or {}).get(key) or content.get(key)


def _faults(path: Path) -> Iterator[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    # A number that was read from several training runs names all their commits.
    commits = {each for value in filter(None, _values(content, "commit")) for each in str(value).split(", ")}
    known, date = commit_dates(), _of_run(content, "date")
    if not commits:
        yield "names no commit"
    for commit in sorted(commits):
        if not COMMIT.fullmatch(commit):
            yield f"{commit!r} is not a clean commit"
        elif known and commit not in known:
            yield f"{commit} is not a commit of this repository"
    own = _of_run(content, "commit")
    if date is None:
        if path.stem not in WITHOUT_DATE:
            yield "names no date"
    elif own in known and datetime.fromisoformat(date) < datetime.fromisoformat(known[own]):
        yield f"was measured at {date}, before its commit of {known[own]}"
    if not isinstance(content.get("command"), str):
        yield "names no command"
    machine = content.get("environment") or content.get("machine") or {}
    if not (content.get("environment") or (machine and content.get("versions"))):
        yield "names no machine and versions"
    for name, text in generated_from(path).items():
        yield from _differences(path.with_name(name), text)


def _differences(path: Path, text: str) -> Iterator[str]:
    """Yield a fault of a generated file unless it has this text."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        yield f"{path.name} is not up to date"


def _values(content: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key at any depth."""
    if isinstance(content, dict):
        if key in content:
            yield content[key]
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from _values(item, key)
