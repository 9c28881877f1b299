"""The files of the scoreboard: a Markdown page and a CSV file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from zoo.files import write_text
from zoo.reproduce.comparison import CRITERIA, Comparison
from zoo.reproduce.paper_report import plot_name, read_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import STATES, Row, by_item, counts_by_evidence, rows_of, verdict_lines
from zoo.tables import Cell, markdown_list, markdown_page, markdown_table

PAGE, CSV = "README.md", "reproduction.csv"
# Markers around the scoreboard on its page.
BEGIN, END = "<!-- scoreboard -->\n", "<!-- /scoreboard -->"
HEADING = "# Published numbers\n\n"  # the first lines of a new page
SCOPE = (
    "A row stands for a number in a table, a figure or the text of a paper, or in its authors' public code, README or "
    "blog. For a curve, the rows cover its endpoints, its extremes, and any points in the authors' logs. "
    "Figure 3 and the training curves of Figure 4 of the RevNet paper are left out, and so are table cells of "
    "the RevNeXt paper that no available copy shows. Where the rule or the method of a paper differs from what this "
    "package does by default, both are measured, and the verdict of the row is the one farther from the paper."
)
STATE_MEANINGS = {
    "reproduced": "within the tolerance of its kind of evidence",
    "better": "beyond the tolerance in the better direction: less memory or time, more images or pixels in the same "
    "memory, or a larger signal-to-noise ratio",
    "off": "beyond the tolerance otherwise",
    "underpowered": "too few images, runs or rounds for another verdict",
    "not measured": "the row has the command that measures it, or the reason why there is none",
}
KIND_MEANINGS = {
    "printed": "printed in the paper",
    "derived": "computed from printed numbers",
    "authors' log": "output stored in the authors' public code",
    "read off a figure": "estimated from a plot",
}


def read_rows(folder: Path) -> list[Row]:
    """Read the rows of all papers from their reports in ``folder``. Raises ConfigError for other files there."""
    return rows_of({paper: read_report(folder, paper) for paper in PAPERS})


def write_forms(folder: Path) -> list[str]:
    """Write the files of the scoreboard into the folder of the reports; return the names of these files.

    Preserves the rest of README.md.
    """
    rows = read_rows(folder)
    page = folder / PAGE
    text = page.read_text(encoding="utf-8") if page.exists() else f"{HEADING}{BEGIN}{END}\n"
    before, _, rest = text.partition(BEGIN)
    write_text(page, before + BEGIN + summary(rows) + END + rest.partition(END)[2])
    write_text(folder / CSV, csv_text(rows))
    return [PAGE, CSV]


def csv_text(rows: Sequence[Row]) -> str:
    """Return a CSV file with one line per measurement, and one line per number without measurement."""
    lines = [_fields_of(row, each) for row in rows for each in row.comparisons]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _fields_of(row: Row, each: Comparison) -> Mapping[str, Any]:
    """Return the columns of a measurement: the number, the verdict, and their provenance."""
    number, verdict = row.number, each.verdict
    return {
        "id": number.id,
        "paper": number.paper,
        "item": number.item,
        "quantity": number.quantity,
        "published": number.text,
        **{key: getattr(number, key) for key in ("unit", "kind", "evidence")},
        "what": each.what,
        "measured": each.measured,
        "n": each.n if row.is_measured else None,
        "repeats": CRITERIA[number.evidence].repeats,
        "spread": each.spread,
        "spread_of": CRITERIA[number.evidence].spread,
        "state": verdict.state,
        "reason": verdict.reason,
        "note": each.note,
        **{key: getattr(number, key) for key in ("finding", "place", "quotation", "network", "settings")},
        "command": row.command,
        "commit": row.environment.get("commit"),
        "date": row.date,
        **{key: value for key, value in row.environment.items() if key not in ("commit", "date")},
    }


def summary(rows: Sequence[Row]) -> str:
    """Return the scoreboard in Markdown: counts by kind of evidence, findings, and a line per table of a paper."""
    headers, *lines = counts_by_evidence(rows)
    better = [row for row in rows if row.state == "better"]
    num_reproduced = sum(any(each.verdict.state == "reproduced" for each in row.comparisons) for row in better)
    off = markdown_list(verdict_lines(rows)[1:])
    parts = [
        f"{SCOPE} In {num_reproduced} of the {len(better)} rows that are better, the other measurement reproduces the "
        f"number. All rows, with the command that measures each: [{CSV}]({CSV}).",
        markdown_table([str(header) for header in headers], lines),
        markdown_list(f"**{state}**: {meaning}" for state, meaning in STATE_MEANINGS.items()),
        *(["## What is off", off] if off else []),
        "## Kinds of evidence and their tolerances",
        markdown_table(
            ["evidence", "tolerance and its reason", "n counts", "spread"],
            [[kind, criterion.reason, criterion.repeats, criterion.spread] for kind, criterion in CRITERIA.items()],
        ),
        "A tolerance is in points for percentages, otherwise relative. Some numbers have bounds instead, which the "
        "verdict names. Kinds of published numbers:",
        markdown_list(f"**{kind}**: {meaning}" for kind, meaning in KIND_MEANINGS.items()),
    ]
    for paper, of_paper in groupby(rows, key=lambda row: row.number.paper):
        parts += [f"## {PAPERS[paper].title}", f"<{PAPERS[paper].url}>", _items_table(by_item(of_paper))]
    return markdown_page(parts)


def _items_table(items: Mapping[str, Sequence[Row]]) -> str:
    """Return one line per item of a paper: its rows by state, and their findings."""
    lines: list[list[Cell]] = []
    for item, rows in items.items():
        counts = Counter(row.state for row in rows)
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        evidence = ", ".join(dict.fromkeys(row.number.evidence for row in rows))
        findings = " ".join(dict.fromkeys(row.number.finding for row in rows if row.number.finding))
        lines.append([_linked(item, rows), len(rows), evidence, states, findings])
    return markdown_table(["item", "rows", "evidence", "states", "findings"], lines)


def _linked(item: str, rows: Sequence[Row]) -> str:
    """Return the name of an item, as a link to its plot if it has one."""
    plots = [plot_name(row.number.paper, row.section.key) for row in rows if row.section and row.section.panels]
    return f"[{item}]({plots[0]})" if plots else item
