"""The report of a paper, PAPER.json, and its plots.

The report stores measurements and their circumstances; verdicts are computed whenever it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from zoo.benchmark.plot_style import Line, Panel, draw_panels
from zoo.errors import ConfigError
from zoo.files import write_bytes, write_json
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import PublishedNumber, published_numbers


def write_report(
    folder: Path, header: Mapping[str, Any], sections: Sequence[ReportSection], *, with_plots: bool
) -> list[str]:
    """Write PAPER.json and, ``with_plots``, the plots of the ``sections``; return the names of these files.

    ``header``: "benchmark" (the paper), "command" and "environment".
    """
    name = header["benchmark"]
    content = {**header, "sections": [_to_json(section) for section in sections]}
    write_json(folder / f"{name}.json", content)
    drawn = {plot_name(name, section.key): section for section in sections if section.panels and with_plots}
    for plot, section in drawn.items():
        write_bytes(folder / plot, draw_panels(f"{section.title}\n{PAPERS[name].title}", section.panels))
    return [f"{name}.json", *drawn]


def read_report(folder: Path, paper: str) -> list[ReportSection]:
    """Read the sections of PAPER.json in ``folder``; empty if there is no such file.

    Drops numbers that are no longer published. Raises ConfigError for a file of another kind.
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


def sections_of(paper: str, content: Mapping[str, Any]) -> list[ReportSection]:
    """Return the sections in the ``content`` of PAPER.json."""
    numbers = {number.id: number for number in published_numbers(paper).values()}
    return [_from_json(each, numbers) for each in content["sections"]]


def plot_name(name: str, key: str) -> str:
    """Return the file name of a section's plot."""
    return f"{name}_{key}.png"


def _to_json(section: ReportSection) -> dict[str, Any]:
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
    return {**content, "published": comparison.published.id, "value": comparison.published.text}


def _from_json(content: Mapping[str, Any], numbers: Mapping[str, PublishedNumber]) -> ReportSection:
    comparisons = []
    for each in content["figures"]:
        if each["published"] in numbers:
            facts = {key: value for key, value in each.items() if key != "value"}
            comparisons.append(Comparison(**{**facts, "published": numbers[each["published"]]}))
    rest = {key: value for key, value in content.items() if key not in ("figures", "panels")}
    return ReportSection(**rest, comparisons=comparisons, panels=[_panel(each) for each in content["panels"]])


def _panel(content: Mapping[str, Any]) -> Panel:
    return Panel(**{**content, "lines": [Line(**line) for line in content["lines"]]})
