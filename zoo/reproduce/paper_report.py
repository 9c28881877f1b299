"""The report of a paper: PAPER.md, PAPER.json and the plots.

PAPER.json stores what was measured and how; verdicts are computed whenever it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from zoo.errors import ConfigError
from zoo.files import write_bytes, write_json, write_text
from zoo.reproduce.comparison import RULES, Comparison, Section
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import PublishedNumber, published_numbers
from zoo.run.plot_style import Line, Panel, draw_panels
from zoo.tables import key_value_text, markdown_list, markdown_page, markdown_table, number_text

HEADERS = ("what", "published", "kind and place", "evidence", "measured", "spread", "verdict", "note")
# Entries of the environment in the Markdown file.
SHOWN_KEYS = ("cpu", "device", "threads", "torch", "norms", "tf32", "pillow", "libjpeg", "zoo", "commit", "date")


def write_report(folder: Path, header: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Write PAPER.md, PAPER.json and missing plots of the ``sections``; return the Markdown.

    ``header``: "benchmark" (the paper), "command", "environment", and "plots": whether to draw plots.
    """
    name = header["benchmark"]
    content = {**header, "sections": [_to_json(section) for section in sections]}
    text = report_text(content)
    write_json(folder / f"{name}.json", content)
    write_text(folder / f"{name}.md", text)
    for section in sections:
        if section.panels and header["plots"]:
            write_bytes(folder / plot_name(name, section.key), draw_panels(section.title, section.panels))
    return text


def read_report(folder: Path, paper: str) -> list[Section]:
    """Return the sections of PAPER.json in ``folder``, none if there is no such file.

    Numbers that are not published any more are left out. Raises ConfigError for a file of another kind.
    """
    path = folder / f"{paper}.json"
    if not path.exists():
        return []
    try:
        return sections_of(paper, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "this file was not written by zoo reproduce", path, "remove it, or give another --out"
        ) from error


def sections_of(paper: str, content: Mapping[str, Any]) -> list[Section]:
    """Return the sections in the ``content`` of PAPER.json."""
    numbers = {number.id: number for number in published_numbers(paper).values()}
    return [_from_json(each, numbers) for each in content["sections"]]


def report_text(content: Mapping[str, Any]) -> str:
    """Return PAPER.md, given the ``content`` of PAPER.json."""
    environment = {key: content["environment"].get(key) for key in SHOWN_KEYS}
    header = [f"command: `{content['command']}`", key_value_text(environment)]
    blocks = [f"# {PAPERS[content['benchmark']].title}", markdown_list(header)]
    for section in sections_of(content["benchmark"], content):
        blocks += _blocks(section)
        if section.panels and content.get("plots", True):
            blocks.append(f"![{section.title}]({plot_name(content['benchmark'], section.key)})")
    return markdown_page(blocks)


def plot_name(name: str, key: str) -> str:
    """Return the file name of a section's plot."""
    return f"{name}_{key}.png"


def spread_text(number: PublishedNumber | None, spread: float | None) -> str:
    """Return a spread with its kind: a standard error as "±", others by their names."""
    if spread is None:
        return ""
    kind = RULES[number.evidence].spread if number is not None else "interquartile range"
    sign = {"standard error": "±", "interquartile range": "IQR"}.get(kind, kind)
    return f"{sign} {number_text(spread)}" if kind else ""


def _to_json(section: Section) -> dict[str, Any]:
    """Return the section's fields, with the comparisons under the key "figures"."""
    content = asdict(replace(section, comparisons=[]))
    del content["comparisons"]
    return {**content, "figures": [_comparison_to_json(comparison) for comparison in section.comparisons]}


def _comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the fields of a comparison that differ from their defaults, with id and value of the published number."""
    content = {
        field.name: getattr(comparison, field.name)
        for field in fields(comparison)
        if field.default is MISSING or getattr(comparison, field.name) != field.default
    }
    if comparison.published is not None:
        content |= {"published": comparison.published.id, "value": comparison.published.text}
    return content


def _from_json(content: Mapping[str, Any], numbers: Mapping[str, PublishedNumber]) -> Section:
    comparisons = []
    for each in content["figures"]:
        if each.get("published") is None or each["published"] in numbers:
            number = numbers.get(each.get("published"))
            facts = {key: value for key, value in each.items() if key != "value"}
            comparisons.append(Comparison(**{**facts, "published": number}))
    rest = {key: value for key, value in content.items() if key not in ("figures", "panels")}
    return Section(**rest, comparisons=comparisons, panels=[_panel(each) for each in content["panels"]])


def _panel(content: Mapping[str, Any]) -> Panel:
    return Panel(**{**content, "lines": [Line(**line) for line in content["lines"]]})


def _blocks(section: Section) -> list[str]:
    """Return heading, setting, table and notes of a section."""
    rows = []
    for each in section.comparisons:
        number = each.published
        published = ["", "", ""] if number is None else [number.text, f"{number.kind}, {number.place}", number.evidence]
        measured = f"{number_text(each.measured)} {each.unit}".strip() if each.measured is not None else ""
        spread = spread_text(number, each.spread)
        rows.append([each.what, *published, measured, spread, str(each.verdict or ""), each.note])
    commit, date = (str(section.environment.get(key) or "unknown") for key in ("commit", "date"))
    setting = f"{section.setting} (`{section.command}`, {section.seconds:.0f} s, commit {commit[:10]}, {date[:10]})"
    findings = dict.fromkeys(each.published.finding for each in section.comparisons if each.published)
    notes = [*section.notes, *(f"**finding**: {finding}" for finding in findings if finding)]
    return [f"## {section.title}", setting, markdown_table(HEADERS, rows) if rows else "", markdown_list(notes)]
