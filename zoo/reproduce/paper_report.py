"""The report of a paper: PAPER.md, PAPER.json and the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from zoo.files import write_bytes, write_json, write_text
from zoo.reproduce.comparison import Comparison, Section
from zoo.reproduce.plot import draw
from zoo.run.cost import CostMeter
from zoo.tables import markdown_table, number_text

HEADERS = ("what", "published", "kind and place", "measured", "unit", "verdict")
# Of the environment, in the Markdown file.
SHOWN = ("cpu", "device", "threads", "torch", "norms", "tf32", "pillow", "libjpeg", "zoo", "commit", "date")


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
    folder, name = report.folder, report.name
    content: dict[str, Any] = {"benchmark": name, "command": report.command, "environment": report.environment}
    content |= {"cost": report.cost.read(), "remarks": list(report.remarks), "plots": report.plots}
    content |= {"sections": [_to_json(section) for section in sections]}
    text = report_text(report.title, content)
    write_json(folder / f"{name}.json", content)
    write_text(folder / f"{name}.md", text)
    for section in sections:
        if section.panels and report.plots:
            write_bytes(folder / _plot(name, section.key), draw(section))
    return text


def report_text(title: str, content: Mapping[str, Any]) -> str:
    """Return PAPER.md, which is made of the ``content`` of PAPER.json; ``title`` is its heading."""
    environment = content["environment"]
    header = [f"# {title}", "", f"- command: `{content['command']}`"]
    header += ["- " + ", ".join(f"{key} {environment[key]}" for key in SHOWN if environment.get(key))]
    header += [f"- {remark}" for remark in content["remarks"]]
    sections = [
        _markdown(
            section,
            _plot(content["benchmark"], section["key"]) if section["panels"] and content.get("plots", True) else None,
        )
        for section in content["sections"]
    ]
    return "\n".join([*header, *sections]) + "\n"


def _plot(name: str, key: str) -> str:
    """Return the name of the file with the plot of a section."""
    return f"{name}_{key}.png"


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


def _markdown(section: Mapping[str, Any], plot: str | None) -> str:
    """Return a section of the JSON file as a part of the report; ``plot`` is the name of the file with its plot."""
    lines = ["", f"## {section['title']}", "", f"{section['setting']} ({section['seconds']:.0f} s)"]
    rows = [[each["what"], *_published(each["published"]), number_text(each["measured"]), each["unit"], each["verdict"]]
            for each in section["figures"]]  # fmt: skip
    lines += ["", markdown_table(HEADERS, rows)] if rows else []
    lines += ["", *(f"- {note}" for note in section["notes"])] if section["notes"] else []
    lines += ["", f"![{section['title']}]({plot})"] if plot else []
    return "\n".join(lines)


def _published(published: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return what was published, and its kind and place; empty texts for nothing."""
    return (
        ("", "")
        if published is None
        else (number_text(published["value"]), f"{published['kind']}, {published['place']}")
    )
