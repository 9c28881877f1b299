"""The report of a paper: PAPER.md, PAPER.json and the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from zoo.files import write_bytes, write_json, write_text
from zoo.report.cost import CostMeter
from zoo.report.tables import markdown_table, number_text
from zoo.reproduce.comparison import Comparison, Section
from zoo.reproduce.plot import draw
from zoo.reproduce.published_numbers import PublishedNumber

HEADERS = ("what", "published", "kind and place", "measured", "unit", "verdict")
SHOWN = ("cpu", "device", "threads", "torch", "zoo", "commit")  # of the environment, in the Markdown file


@dataclass(frozen=True)
class Report:
    """The report of a paper, which is written anew after each of its items.

    Args:
    - `folder`, `name`: where its files are, and how their names begin.
    - `title`: its heading.
    - `command`: what measures it.
    - `environment`: the versions and the machine.
    - `plots`: whether to draw plots.
    - `cost`: what counts the cost of measuring.
    - `remarks`: what stands on top.
    """

    folder: Path
    name: str
    title: str
    command: str
    environment: Mapping[str, Any]
    plots: bool
    cost: CostMeter
    remarks: Sequence[str] = ()


def write_report(report: Report, sections: Sequence[Section]) -> str:
    """Write PAPER.md, PAPER.json and the plots of the ``sections``; return the Markdown."""
    folder, name, environment = report.folder, report.name, report.environment
    header = [f"# {report.title}", "", f"- command: `{report.command}`"]
    header += ["- " + ", ".join(f"{key} {environment[key]}" for key in SHOWN)]
    header += [f"- {remark}" for remark in report.remarks]
    drawn = {section.key: f"{name}_{section.key}.png" for section in sections if section.panels and report.plots}
    text = "\n".join([*header, *(_markdown(section, drawn.get(section.key)) for section in sections)]) + "\n"
    content: dict[str, Any] = {"benchmark": name, "command": report.command, "environment": environment}
    content |= {"cost": report.cost.read(), "remarks": list(report.remarks)}
    content |= {"sections": [_to_json(section) for section in sections]}
    write_json(folder / f"{name}.json", content)
    write_text(folder / f"{name}.md", text)
    for section in sections:
        if section.key in drawn:
            write_bytes(folder / drawn[section.key], draw(section))
    return text


def _to_json(section: Section) -> dict[str, Any]:
    """Return the section's fields; the files have always called the comparisons "figures"."""
    content = asdict(replace(section, comparisons=[]))
    del content["comparisons"]
    return {**content, "figures": [_comparison_to_json(comparison) for comparison in section.comparisons]}


def _comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    number, verdict = comparison.published, comparison.verdict
    published = None if number is None else number.model_dump(include={"id", "kind", "place", "value"})
    content = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    return {**content, "published": published, "verdict": str(verdict), "state": verdict.state}


def _markdown(section: Section, plot: str | None) -> str:
    """Return the section's part of the report; ``plot`` is the name of the file with its plot."""
    lines = ["", f"## {section.title}", "", f"{section.setting} ({section.seconds:.0f} s)"]
    rows = [[each.what, *_published(each.published), number_text(each.measured), each.unit, str(each.verdict)]
            for each in section.comparisons]  # fmt: skip
    lines += ["", markdown_table(HEADERS, rows)] if rows else []
    lines += ["", *(f"- {note}" for note in section.notes)] if section.notes else []
    lines += ["", f"![{section.title}]({plot})"] if plot else []
    return "\n".join(lines)


def _published(published: PublishedNumber | None) -> tuple[str, str]:
    """Return what was published, and its kind and place; empty texts for nothing."""
    return ("", "") if published is None else (number_text(published.value), f"{published.kind}, {published.place}")
