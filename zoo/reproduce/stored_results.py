"""Whether result files can be believed: each says how it was measured and can be measured again."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from zoo.benchmark.results import markdown
from zoo.errors import listed, printable
from zoo.reproduce.ledger import Row
from zoo.reproduce.ledger_files import forms_of
from zoo.reproduce.paper_report import report_text
from zoo.reproduce.papers import PAPERS
from zoo.run.environment import DIRTY

COMMIT = re.compile(r"[0-9a-f]{40}")
SHOWN_DIGITS = 10
QUOTED_COMMAND = re.compile(r"`(zoo [^`]*)`")

# Shortened from logs of training runs before there was a command for it; the files say so themselves.
BY_HAND = ("cifar10_flat.json", "cifar10_revnext.json")

KERNELS = ("csrc", "zoo/ops", "zoo/layers")
NETWORKS = (*KERNELS, "zoo/models", "zoo/architectures.py")
TRAINING = (*NETWORKS, "zoo/data", "zoo/engine", "zoo/tasks")
# What the numbers of a kind of file depend on: a change there may change them.
SOURCES = {
    "layer": (*KERNELS, "zoo/benchmark"),
    **dict.fromkeys(("model", "pareto", "fit", "lean", "predict"), (*NETWORKS, "zoo/benchmark")),
    "quickstart": (*TRAINING, "experiments/quickstart*"),
    "imagenet": (*TRAINING, "zoo/run/scoring.py"),
    **{paper: (*NETWORKS, "zoo/benchmark", f"zoo/reproduce/{paper}_*") for paper in PAPERS},
    **{f"{paper} runs": TRAINING for paper in PAPERS},
}


@dataclass
class Findings:
    """What is wrong with the files of a folder.

    Args:
    - `num_files`: how many files there are.
    - `faults`: a line for each reason not to believe a file.
    - `remarks`: a line for each file that is out of date, or does not say when it was measured.
    """

    num_files: int = 0
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_results(folder: Path, fault_of_command: Callable[[str], str | None]) -> Findings:
    """Return what is wrong with the JSON files of ``folder`` and with what was made of them.

    ``fault_of_command`` returns why the command line does not understand a command, or None if it does. A result is out
    of date if a file of the package that it depends on has changed since the commit that it names.
    """
    findings = Findings()
    for path in sorted(folder.glob("*.json")):
        findings.num_files += 1
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it holds no object")
            faults = list(_faults(path, content, fault_of_command))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            faults, content = [f"it cannot be read ({type(error).__name__}: {error})"], {}
        findings.faults += [f"{path.name}: {fault}" for fault in faults]
        findings.remarks += [f"{path.name}: {remark}" for remark in _remarks(path, content)]
    return findings


def _faults(path: Path, content: dict[str, Any], fault_of_command: Callable[[str], str | None]) -> Iterator[str]:
    """Yield the reasons not to believe a file."""
    if path.name in BY_HAND and "by hand" in content["made_by"]:
        return
    # A number of several training runs names the commits of all of them.
    commits = dict.fromkeys(
        each for value in filter(None, _values(content, "commit")) for each in str(value).split(", ")
    )
    if not commits:
        yield "it names no commit"
    for commit in commits:
        if commit.endswith(DIRTY):
            yield f"the commit {commit} cannot be checked out: commit first, then measure again"
        elif not COMMIT.fullmatch(commit):
            yield f"{printable(commit)} is no commit"
    if not isinstance(content.get("command"), str):
        yield "it names no command"
    if not (content.get("environment") or (content.get("machine") and content.get("versions"))):
        yield "it does not say on what machine and with what versions it was measured"
    if not _date(path, content):
        yield "it has no date"
    for command in dict.fromkeys(_commands(content)):
        if (fault := fault_of_command(command)) is not None:
            yield f"the command line does not understand `{printable(command)}`: {fault}"
    unfounded = [row["id"] for row in content.get("rows", ()) if row.get("measured") is not None
                 and "id" in row and not (row["commit"] and row["date"])]  # fmt: skip
    if unfounded:
        yield f"{len(unfounded)} rows were measured, but have no commit or no date: {listed(unfounded, 3)}"
    for name, text in _made_of(path, content).items():
        file = path.with_name(name)
        if not file.exists():
            yield f"{name} is missing, which is made of it"
        elif file.read_text(encoding="utf-8") != text:
            yield f"{name} is not what is made of it"


def _made_of(path: Path, content: dict[str, Any]) -> Mapping[str, str]:
    """Return the files that are made of a result file alone, by their names."""
    name = content.get("benchmark")
    if "records" in content:
        return {f"{path.stem}.md": markdown(content)}
    if name in PAPERS:
        return {f"{path.stem}.md": report_text(PAPERS[name].title, content)}
    if name == "reproduction":
        return forms_of([Row(**row) for row in content["rows"]], content["command"])
    return {}


def _remarks(path: Path, content: dict[str, Any]) -> Iterator[str]:
    """Yield what a reader should know of a file that can be believed."""
    if path.name in BY_HAND:
        yield "no command wrote it, but a hand"
        return
    if content and not any(_values(content, "date", "finished")) and (date := _date(path, content)):
        yield f"it has no date; it was committed on {date}"
    measured: dict[str, set[str]] = defaultdict(set)  # what the numbers of each commit depend on
    if content.get("benchmark") == "reproduction":
        for row in content.get("rows", ()):
            measured[str(row.get("commit"))].update(SOURCES.get(row.get("paper"), ()))
    else:
        for commit in _values(content, "commit"):
            measured[str(commit)].update(SOURCES.get(str(content.get("benchmark")), ()))
    for commit, sources in measured.items():
        if sources and COMMIT.fullmatch(commit):
            yield from _changes(path.parent, commit, tuple(sorted(sources)))


@cache
def _changes(folder: Path, commit: str, sources: tuple[str, ...]) -> list[str]:
    """Return, as no line or one, which files below ``sources`` are not those of the commit."""
    short = commit[:SHOWN_DIGITS]
    paths = [*(f":(top){source}" for source in sources), ":(top,exclude)*.md"]
    changed = _git(folder, "diff", "--name-only", commit, "--", *paths)
    if changed is None:
        return [f"commit {short} is not known here, so that nobody can say whether the file is out of date"]
    files = changed.splitlines()
    return [
        f"out of date: {len(files)} files that it depends on have changed since {short}: {listed(files, 3)}"
    ] * bool(files)


def _date(path: Path, content: dict[str, Any]) -> str:
    """Return a date that the file has, or that of its last commit; empty for neither."""
    for date in _values(content, "date", "finished"):
        if date:
            return str(date)
    return (_git(path.parent, "log", "-1", "--format=%cs", "--", path.name) or "").strip()


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _commands(content: Any) -> Iterator[str]:
    """Yield the commands of zoo in a file: those of keys called so, and those that verdicts quote."""
    for command in _values(content, "command"):
        if str(command).startswith("zoo "):
            yield command
    for verdict in _values(content, "verdict"):
        yield from QUOTED_COMMAND.findall(str(verdict))


def _values(content: Any, *keys: str) -> Iterator[Any]:
    """Yield the values of all ``keys`` in a file's content, at any depth."""
    if isinstance(content, dict):
        yield from (content[key] for key in keys if key in content)
    for item in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _values(item, *keys)
