"""Checks that result files state their provenance and that what is generated from them is up to date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from zoo.benchmark.results import markdown
from zoo.reproduce.comparison import Comparison, Section
from zoo.reproduce.paper_report import report_text, sections_of
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import published_numbers
from zoo.reproduce.scoreboard import rows_of
from zoo.reproduce.scoreboard_files import forms_of
from zoo.reproduce.training_runs import TrainingRun, read_runs
from zoo.run.environment import git

COMMIT = re.compile(r"[0-9a-f]{40}")
PROCESSOR = re.compile(r"\d")  # a name without a number, such as "AMD EPYC", may be any processor of its maker
# Faults of files that were written before these facts were recorded, by file. A file that is measured again leaves it.
KNOWN_FAULTS = "known_faults.json"
# Items that take no time to measure: they are measured again.
EXACT_ITEMS = ("Table 2",)


def find_faults(folder: Path) -> list[str]:
    """Return a line for each fault of the JSON files of ``folder``, and of the files generated from them.

    Faults in known_faults.json are left out; an entry there that is no fault any more is one.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != KNOWN_FAULTS]
    known = json.loads((folder / KNOWN_FAULTS).read_text()) if (folder / KNOWN_FAULTS).exists() else {}
    faults = []
    for path in paths:
        found = list(_faults(path))
        faults += [f"{path.name}: {fault}" for fault in found if fault not in known.get(path.name, ())]
        gone = [fault for fault in known.get(path.name, ()) if fault not in found]
        faults += [f"{KNOWN_FAULTS}: {path.name} has no fault {fault!r} any more" for fault in gone]
    faults += [f"{KNOWN_FAULTS}: there is no {name}" for name in known if name not in {path.name for path in paths}]
    return faults + list(_scoreboard_faults(folder))


def still_known(folder: Path) -> dict[str, list[str]]:
    """Return the entries of known_faults.json that are still faults; none is added."""
    known = json.loads((folder / KNOWN_FAULTS).read_text())
    found = {name: list(_faults(folder / name)) for name in known if (folder / name).exists()}
    left = {name: [fault for fault in known[name] if fault in faults] for name, faults in found.items()}
    return {name: faults for name, faults in left.items() if faults}


def generated_from(path: Path) -> Mapping[str, str]:
    """Return the text files that are generated from a result file, as contents by file name."""
    content = json.loads(path.read_text(encoding="utf-8"))
    name = content.get("benchmark")
    if "records" in content:
        return {f"{path.stem}.md": markdown(content)}
    return {f"{path.stem}.md": report_text(content)} if name in PAPERS else {}


def generated_from_reports(folder: Path) -> Mapping[str, str]:
    """Return the text files that are generated from all reports of ``folder``; none if a report is missing."""
    paths = {paper: folder / f"{paper}.json" for paper in PAPERS}
    if not all(path.exists() for path in paths.values()):
        return {}
    return forms_of(rows_of({paper: sections_of(paper, json.loads(path.read_text())) for paper, path in paths.items()}))


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
        yield "names no date"
    elif own in known and datetime.fromisoformat(date) < datetime.fromisoformat(known[own]):
        yield f"was measured at {date}, before its commit of {known[own]}"
    if not isinstance(content.get("command"), str):
        yield "names no command"
    machine = content.get("environment") or content.get("machine") or {}
    if not (content.get("environment") or (machine and content.get("versions"))):
        yield "names no machine and versions"
    if not PROCESSOR.search(str(machine.get("cpu") or "")):
        yield "names no processor model"
    if not content.get("cost"):
        yield "names no cost"
    for run in content.get("runs", ()) if str(content.get("benchmark")).endswith(" runs") else ():
        missing = [key for key in ("data", "cost") if not run.get(key)]
        if missing:
            yield f"the run {run['label']}, seed {run['seed']}, names no {' and no '.join(missing)}"
    if content.get("benchmark") in PAPERS:
        yield from _report_faults(path, content)
    for name, text in generated_from(path).items():
        file = path.with_name(name)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            yield f"{name} is not up to date"


def _report_faults(path: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a report: numbers that are not those published, and not those that can be measured again."""
    paper = content["benchmark"]
    values = {number.id: number.text for number in published_numbers(paper).values()}
    for figure in (figure for section in content["sections"] for figure in section["figures"]):
        id = figure.get("published")
        if id is not None and values.get(id) != figure.get("value"):
            yield f"{id} was measured against {figure.get('value')}, but {values.get(id, 'nothing')} is published"
    runs = _runs_beside(path.parent, paper)
    expected = {section.key: section for section in _measured_again(paper, tuple(runs))}
    for section in sections_of(paper, content):
        again = expected.get(section.key)
        for index, each in enumerate(section.comparisons):
            from_runs = each.published is not None and each.published.evidence == "accuracy trained"
            if each.measured is None or not (again or from_runs):
                continue
            same = again is not None and any(_facts(each) == _facts(other) for other in again.comparisons)
            if not same:
                source = "in no run of a file of runs" if from_runs else "not what is measured again"
                yield f"{section.key}, figure {index + 1} ({each.what}): {each.measured} is {source}"


def _facts(comparison: Comparison) -> tuple[Any, ...]:
    measured = comparison.measured
    rounded = f"{measured:.9g}" if isinstance(measured, (int, float)) else measured
    spread = None if comparison.spread is None else f"{comparison.spread:.9g}"
    return comparison.what, rounded, spread, comparison.n, comparison.weakness


def _runs_beside(folder: Path, paper: str) -> list[TrainingRun]:
    """Return the runs of a paper in the files of runs of a folder."""
    path = folder / f"{paper}_runs.json"
    return read_runs([path], PAPERS[paper].experiments)[0] if path.exists() else []


def _measured_again(paper: str, runs: tuple[TrainingRun, ...]) -> list[Section]:
    """Return the sections that follow from training runs, and those that take no time to measure."""
    exact = list(_exact_sections(paper))
    measurements = PAPERS[paper].measurements(runs)
    of_runs = [each for each in measurements if isinstance(each.measure, partial) and runs in each.measure.args]
    return exact + [each.measure() for each in of_runs if runs]


@cache
def _exact_sections(paper: str) -> tuple[Section, ...]:
    measurements = [each for each in PAPERS[paper].measurements() if each.item in EXACT_ITEMS]
    skipped = ("measure_memory_gains", "report_gpu", "report_segmentation_scores")
    return tuple(each.measure() for each in measurements if getattr(each.measure, "__name__", "") not in skipped)


def _scoreboard_faults(folder: Path) -> Iterator[str]:
    """Yield the forms of the scoreboard that differ from the reports."""
    for name, text in generated_from_reports(folder).items():
        file = folder / name
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
