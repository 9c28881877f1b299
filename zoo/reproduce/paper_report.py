"""The report of a paper: PAPER.md, PAPER.json and the plots.

``python -m zoo.reproduce.paper_report FILE.json`` redraws the plots of an earlier report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from zoo.files import write_bytes, write_json, write_text
from zoo.reproduce.comparison import Comparison, Section
from zoo.run.cost import CostMeter
from zoo.run.plot_style import Line, Panel, draw_panels
from zoo.tables import key_value_text, markdown_list, markdown_page, markdown_table, number_text

HEADERS = ("what", "published", "kind and place", "measured", "unit", "verdict")
# Entries of the environment in the Markdown file.
SHOWN_KEYS = ("cpu", "device", "threads", "torch", "norms", "tf32", "pillow", "libjpeg", "zoo", "commit", "date")


@dataclass(frozen=True)
class Report:
    """Settings of the report of a paper, which is rewritten after each item.

    Args:
    - `folder`, `name`: folder and file name stem of the report.
    - `title`: its heading.
    - `command`: the command line.
    - `environment`: versions and machine.
    - `plots`: whether to draw plots.
    - `cost`: measures the duration.
    - `remarks`: list items of the header.
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
            write_bytes(folder / _plot(name, section.key), draw_panels(section.title, section.panels))
    return text


def report_text(title: str, content: Mapping[str, Any]) -> str:
    """Return PAPER.md, given its ``title`` and the ``content`` of PAPER.json."""
    environment = {key: content["environment"].get(key) for key in SHOWN_KEYS}
    header = [f"command: `{content['command']}`", key_value_text(environment), *content["remarks"]]
    blocks = [f"# {title}", markdown_list(header)]
    for section in content["sections"]:
        blocks += _blocks(section)
        if section["panels"] and content.get("plots", True):
            blocks.append(f"![{section['title']}]({_plot(content['benchmark'], section['key'])})")
    return markdown_page(blocks)


def _plot(name: str, key: str) -> str:
    """Return the file name of a section's plot."""
    return f"{name}_{key}.png"


def _to_json(section: Section) -> dict[str, Any]:
    """Return the section's fields, with the comparisons under the key "figures"."""
    content = asdict(replace(section, comparisons=[]))
    del content["comparisons"]
    return {**content, "figures": [_comparison_to_json(comparison) for comparison in section.comparisons]}


def _comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    number, verdict = comparison.published, comparison.verdict
    published = None if number is None else number.model_dump(include={"id", "kind", "place", "value"})
    content = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    return {**content, "published": published, "verdict": str(verdict), "state": verdict.state}


def _blocks(section: Mapping[str, Any]) -> list[str]:
    """Return heading, setting, table and notes of a section of the JSON file."""
    rows = [[each["what"], *_published(each["published"]), number_text(each["measured"]), each["unit"], each["verdict"]]
            for each in section["figures"]]  # fmt: skip
    setting = f"{section['setting']} ({section['seconds']:.0f} s)"
    table = markdown_table(HEADERS, rows) if rows else ""
    return [f"## {section['title']}", setting, table, markdown_list(section["notes"])]


def _published(published: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return a published number, and its kind and place; empty texts for None."""
    if published is None:
        return "", ""
    return number_text(published["value"]), f"{published['kind']}, {published['place']}"


def redraw(path: Path) -> None:
    """Redraw the plots of the report ``path``, a JSON file, into files next to it."""
    for section in json.loads(path.read_text(encoding="utf-8"))["sections"]:
        if section["panels"]:
            panels = [Panel(**each | {"lines": [Line(**line) for line in each["lines"]]}) for each in section["panels"]]
            write_bytes(path.with_name(_plot(path.stem, section["key"])), draw_panels(section["title"], panels))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        redraw(Path(name))
