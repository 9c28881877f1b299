"""Checks that result files state their provenance and that the files generated from them are up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo.benchmark.results import markdown
from zoo.reproduce.paper_report import report_text
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import Row
from zoo.reproduce.scoreboard_files import forms_of

COMMIT = re.compile(r"[0-9a-f]{40}")

# Extracted manually from training logs before there was a command for it; their key "made_by" says so.
MANUAL = ("cifar10_flat.json", "cifar10_revnext.json")


def find_faults(folder: Path) -> list[str]:
    """Return a line for each fault of the JSON files of ``folder`` and of the files generated from them."""
    return [f"{path.name}: {fault}" for path in sorted(folder.glob("*.json")) for fault in _faults(path)]


def generated_from(path: Path) -> Mapping[str, str]:
    """Return the text files that are generated from a result file, as contents by file name."""
    content = json.loads(path.read_text(encoding="utf-8"))
    name = content.get("benchmark")
    if "records" in content:
        return {f"{path.stem}.md": markdown(content)}
    if name in PAPERS:
        return {f"{path.stem}.md": report_text(PAPERS[name].title, content)}
    if name == "reproduction":
        return forms_of([Row(**row) for row in content["rows"]], content["command"])
    return {}


def _faults(path: Path) -> Iterator[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if path.name in MANUAL:
        return
    # A number that was read from several training runs names all their commits.
    commits = {each for value in filter(None, _values(content, "commit")) for each in str(value).split(", ")}
    if not commits:
        yield "names no commit"
    for commit in sorted(commits):
        if not COMMIT.fullmatch(commit):
            yield f"{commit!r} is not a clean commit"
    if not isinstance(content.get("command"), str):
        yield "names no command"
    if not (content.get("environment") or (content.get("machine") and content.get("versions"))):
        yield "names no machine and versions"
    for row in content.get("rows", ()):
        if row.get("measured") is not None and not (row["commit"] and row["date"]):
            yield f"row {row['id']} was measured, but has no commit or no date"
    for name, text in generated_from(path).items():
        file = path.with_name(name)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            yield f"{name} is not up to date"


def _values(content: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key at any depth."""
    if isinstance(content, dict):
        if key in content:
            yield content[key]
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from _values(item, key)
