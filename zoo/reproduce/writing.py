"""The files of a reproduction: NAME.md, NAME.json, and a plot NAME_KEY.png for each section that has panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from zoo.files import write_bytes, write_json, write_text
from zoo.report.environment import describe_environment
from zoo.report.tables import markdown_table
from zoo.reproduce.plot import draw
from zoo.reproduce.schema import Published, Section, Value

HEADERS = ("what", "published", "kind and place", "measured", "unit", "verdict")
SHOWN = ("cpu", "device", "threads", "torch", "zoo", "commit")  # of the environment, in the text


def write_report(
    folder: Path,
    name: str,
    title: str,
    command: str,
    sections: Sequence[Section],
    remarks: Sequence[str] = (),
    *,
    plots: bool = True,
) -> str:
    """Write the files of all ``sections`` and return the Markdown, ``remarks`` on top; plots need matplotlib."""
    environment = describe_environment(torch.device("cpu"))
    header = [f"# {title}", "", f"- command: `{command}`"]
    header += ["- " + ", ".join(f"{key} {environment[key]}" for key in SHOWN), *(f"- {remark}" for remark in remarks)]
    text = "\n".join([*header, *(_markdown(name, section, plots) for section in sections)]) + "\n"
    content = {"benchmark": name, "command": command, "environment": environment, "remarks": list(remarks)}
    write_json(folder / f"{name}.json", {**content, "sections": [asdict(section) for section in sections]})
    write_text(folder / f"{name}.md", text)
    for section in sections if plots else ():
        if section.panels:
            write_bytes(folder / _plot(name, section), draw(section))
    return text


def _markdown(name: str, section: Section, plots: bool) -> str:
    lines = ["", f"## {section.title}", "", f"{section.setting} ({section.seconds:.0f} s)"]
    rows = [[figure.what, *_published(figure.published), _text(figure.measured), figure.unit, figure.verdict]
            for figure in section.figures]  # fmt: skip
    lines += ["", markdown_table(HEADERS, rows)] if rows else []
    lines += ["", *(f"- {note}" for note in section.notes)] if section.notes else []
    if plots and section.panels:
        lines += ["", f"![{section.title}]({_plot(name, section)})"]
    return "\n".join(lines)


def _published(published: Published | None) -> tuple[str, str]:
    """Return what was published, and its kind and place; empty texts for nothing."""
    return ("", "") if published is None else (_text(published.value), f"{published.kind}, {published.place}")


def _plot(name: str, section: Section) -> str:
    return f"{name}_{section.key}.png"


def _text(value: Value) -> str:
    """Return a number with four digits, or all of a whole one."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
