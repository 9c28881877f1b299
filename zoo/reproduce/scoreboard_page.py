"""The scoreboard as a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from zoo.reproduce.scoreboard import STATES, Row, by_item, count_sentence, count_states
from zoo.tables import Cell, key_value_text, markdown_list, markdown_page, markdown_table, number_text

JSON, CSV = "reproduction.json", "reproduction.csv"
TITLE = "Published and measured numbers"
STATE_MEANINGS = {
    "reproduced": "the measured number agrees with the published one, within the tolerance in the verdict",
    "off": "the measured number differs by more than the tolerance; the verdict says by how much",
    "underpowered": "too few images or runs were measured for a verdict",
    "needs data": "the command in the verdict measures it, given the data set",
    "needs training": "the command in the verdict trains the network",
    "not built": "this package does not measure it; the verdict gives the reason",
    "not run": "the command in the verdict measures it, but has not been run for this page",
}
KIND_MEANINGS = {
    "printed": "printed in the paper",
    "derived": "computed from printed numbers",
    "authors' log": "output stored in the authors' public code",
    "read off a figure": "estimated from a plot",
}
HEADERS = ("quantity", "published", "kind", "measured", "n", "spread", "verdict", "command", "commit", "date")
LONG_COMMIT = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")  # shortened to ten digits


def scoreboard_page(rows: Sequence[Row], titles: Mapping[str, str], command: str) -> str:
    """Return the Markdown page. ``titles``: titles of the papers; ``command``: command of the last run."""
    parts = [
        f"# {TITLE}",
        f"{count_sentence(rows)} Written by `{command}`. The same rows, with quotations, places, versions and digests, "
        f"are in [{CSV}]({CSV}) and [{JSON}]({JSON}).",
        _counts_table(rows),
        markdown_list(f"**{state}**: {meaning}" for state, meaning in STATE_MEANINGS.items()),
        "Kinds of published numbers:",
        markdown_list(f"**{kind}**: {meaning}" for kind, meaning in KIND_MEANINGS.items()),
        "n is the number of runs or repetitions. The spread is the standard error of an accuracy, or the interquartile "
        "range of times.",
        "## Measured with",
        markdown_list(measured_with(rows)),
    ]
    for paper, of_paper in groupby(rows, key=lambda row: row.paper):
        parts.append(f"## {titles[paper]}")
        for item, of_item in by_item(of_paper).items():
            parts.append(f"### {item}")
            commands = list(dict.fromkeys(row.command for row in of_item))
            parts.append("\n".join(f"{number}. `{command}`" for number, command in enumerate(commands, 1)))
            parts.append(markdown_table(HEADERS, [_cells(row, commands.index(row.command) + 1) for row in of_item]))
    return markdown_page(parts)


def measured_with(rows: Sequence[Row]) -> list[str]:
    """Return a line per commit, machine and versions, with the number of its rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.environment:
            groups.setdefault((row.commit, key_value_text(row.environment)), []).append(row)
    commits = list(dict.fromkeys(commit for commit, _ in groups))
    lines = [f"The rows were measured on {len(commits)} commits; each row names its own."] if len(commits) > 1 else []
    for (commit, environment), group in groups.items():
        dates = sorted({row.date for row in group if row.date})
        when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "at an unknown time"
        measured = sum(row.measured is not None for row in group)
        commit = f"commit `{commit}`" if commit else "an unknown commit"
        lines.append(f"{len(group)} rows of {commit}, {when}, {measured} of them measured: {environment}")
    without = sum(not row.environment for row in rows)
    return lines + [f"{without} rows without a run, or from training runs that recorded no environment"] * bool(without)


def _counts_table(rows: Sequence[Row]) -> str:
    table: list[list[Cell]] = []
    for paper, group in groupby(rows, key=lambda row: row.paper):
        of_paper = list(group)
        table.append([paper, len(of_paper), *count_states(of_paper).values()])
    table.append(["all", len(rows), *count_states(rows).values()])
    return markdown_table(["paper", "numbers", *STATES], table)


def _cells(row: Row, command: int) -> list[Cell]:
    """Return the cells of a row; ``command`` is the index of its command in the list above the table, from 1."""
    measured, commit = with_unit(row.measured, row.measured_unit), LONG_COMMIT.sub(r"\1", row.commit)
    cells = [with_unit(row.published, row.unit), row.kind, measured, number_text(row.n), number_text(row.spread)]
    return [row.quantity, *cells, row.verdict, f"[{command}]", commit, row.date]


def with_unit(value: Cell, unit: str) -> str:
    """Return a number with its unit, or "" for None."""
    return "" if value is None else f"{number_text(value)} {unit}".strip()
