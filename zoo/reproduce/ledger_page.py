"""The page of the ledger as a Markdown document, and what it has in common with that of HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from zoo.reproduce.ledger import STATES, Row, by_item, count_sentence, count_states
from zoo.tables import Cell, markdown_table, number_text

JSON, CSV, HTML = "reproduction.json", "reproduction.csv", "reproduction.html"
TITLE = "Every published number, and what is measured here"
MEANINGS = {
    "reproduced": "the measured number agrees with the published one, within what the verdict says",
    "off": "it does not, and the verdict says by how much",
    "underpowered": "too few images or runs were measured to say either",
    "needs data": "the command in the verdict measures it, where its data is",
    "needs training": "the command in the verdict trains the network that it is a number of",
    "not built": "nothing in this package measures it, for the reason in the verdict",
    "not run": "the command in the verdict measures it, and has not been run for this page",
}
KINDS = {
    "printed": "it stands in the paper",
    "derived": "it follows from what stands there",
    "authors' log": "it is an output that the authors' public code has kept",
    "read off a figure": "it is only as exact as the eye",
}
HEADERS = ("quantity", "published", "kind", "measured", "n", "spread", "verdict", "command", "commit", "date")
LONG_COMMIT = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")  # ten digits of it are shown


def markdown_page(rows: Sequence[Row], titles: Mapping[str, str], command: str) -> str:
    """Return the page as a Markdown document."""
    parts = [
        f"# {TITLE}",
        f"{count_sentence(rows)} `{command}` wrote this page. The same rows are in [reproduction.html]({HTML}), "
        "where they can be filtered and each shows its quotation and place, the versions and the digests, and in "
        f"[reproduction.csv]({CSV}) and [reproduction.json]({JSON}).",
        _counts_table(rows),
        "\n".join(f"- **{state}**: {meaning}" for state, meaning in MEANINGS.items()),
        "The kinds of published numbers:",
        "\n".join(f"- **{kind}**: {meaning}" for kind, meaning in KINDS.items()),
        "n counts runs or repetitions. The spread is the standard error of an accuracy, or the interquartile range of "
        "times.",
        "## Measured with",
        "\n".join(f"- {line}" for line in measured_with(rows)),
    ]
    for paper, of_paper in groupby(rows, key=lambda row: row.paper):
        parts.append(f"## {titles[paper]}")
        for item, of_item in by_item(of_paper).items():
            parts.append(f"### {item}")
            commands = list(dict.fromkeys(row.command for row in of_item))
            parts.append("\n".join(f"{number}. `{command}`" for number, command in enumerate(commands, 1)))
            parts.append(markdown_table(HEADERS, [_cells(row, commands.index(row.command) + 1) for row in of_item]))
    return "\n\n".join(parts) + "\n"


def measured_with(rows: Sequence[Row]) -> list[str]:
    """Return how many rows are of which commit, machine and versions, a text for each."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.environment:
            groups.setdefault((row.commit, environment_text(row)), []).append(row)
    commits = list(dict.fromkeys(commit for commit, _ in groups))
    lines = [f"The rows are of {len(commits)} commits, and each names its own."] if len(commits) > 1 else []
    for (commit, environment), group in groups.items():
        dates = sorted({row.date for row in group if row.date})
        when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "at an unknown time"
        measured = sum(row.measured is not None for row in group)
        commit = f"commit `{commit}`" if commit else "an unknown commit"
        lines.append(f"{len(group)} rows of {commit}, {when}, {measured} of them measured: {environment}")
    without = sum(not row.environment for row in rows)
    return lines + [f"{without} rows that no command was run for, or whose training runs do not say"] * bool(without)


def environment_text(row: Row) -> str:
    """Return the versions and the machine of a row in one line."""
    return ", ".join(f"{key} {value}" for key, value in row.environment.items() if value not in (None, ""))


def _counts_table(rows: Sequence[Row]) -> str:
    table: list[list[Cell]] = []
    for paper, group in groupby(rows, key=lambda row: row.paper):
        of_paper = list(group)
        table.append([paper, len(of_paper), *count_states(of_paper).values()])
    table.append(["all", len(rows), *count_states(rows).values()])
    return markdown_table(["paper", "numbers", *STATES], table)


def _cells(row: Row, command: int) -> list[Cell]:
    """Return the cells of a row; ``command`` is the number of its command in the list above the table."""
    measured, commit = with_unit(row.measured, row.measured_unit), LONG_COMMIT.sub(r"\1", row.commit)
    cells = [with_unit(row.published, row.unit), row.kind, measured, number_text(row.n), number_text(row.spread)]
    return [row.quantity, *cells, row.verdict, f"[{command}]", commit, row.date]


def with_unit(value: Cell, unit: str) -> str:
    """Return a number with its unit, "" for None."""
    return "" if value is None else f"{number_text(value)} {unit}".strip()
