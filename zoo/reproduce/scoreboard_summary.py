"""The scoreboard as a Markdown page: counts by kind of evidence, findings, and a line per table of a paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from zoo.reproduce.comparison import RULES
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.scoreboard import STATES, Row, by_item, counts_by_evidence
from zoo.tables import Cell, key_value_text, markdown_list, markdown_page, markdown_table

PAGE, HTML, CSV, INDEX = "REPRODUCTION.md", "reproduction.html", "reproduction.csv", "model-index.yml"
TITLE = "Numbers of three papers, next to what is measured here"
SCOPE = (
    "A row stands for a number in a table, a figure or the text of a paper, or in its authors' public code or README. "
    "Of a curve of a figure, the rows are its ends and extremes, and the points that the authors' logs contain. "
    "Figure 3 and the training curves of Figure 4 of the RevNet paper are left out, and the cells of the RevNeXt "
    "paper's tables that no text available to us shows."
)
STATE_MEANINGS = {
    "reproduced": "within the tolerance of its kind of evidence",
    "better": "beyond the tolerance in the better direction: less memory or time, more images or pixels in the same "
    "memory, or a larger signal-to-noise ratio",
    "agrees": "one or two trained networks, as close to the published accuracy as the authors' own runs to each other",
    "off": "beyond the tolerance otherwise",
    "underpowered": "too few images, runs or rounds for a verdict",
    "needs data": "a command measures it, given the data set",
    "needs training": "a command trains the network",
    "not built": "this package cannot measure it",
    "not run": "a command measures it, but has not been run for this page",
}
KIND_MEANINGS = {
    "printed": "printed in the paper",
    "derived": "computed from printed numbers",
    "authors' log": "output stored in the authors' public code",
    "read off a figure": "estimated from a plot",
}


def scoreboard_summary(rows: Sequence[Row]) -> str:
    """Return the Markdown page."""
    headers, *lines = counts_by_evidence(rows)
    parts = [
        f"# {TITLE}",
        f"{SCOPE} All rows: [{HTML}]({HTML}), [{CSV}]({CSV}). Accuracies in the format of model-index: "
        f"[{INDEX}]({INDEX}). Reports: {', '.join(f'[{paper}]({paper}.md)' for paper in PAPERS)}.",
        "Where the rule or method of a paper differs from what this package does by default, both are measured, and "
        'counted as "by the paper\'s rule / as shipped here". A row has the worse of both states.',
        markdown_table([str(header) for header in headers], lines),
        markdown_list(f"**{state}**: {meaning}" for state, meaning in STATE_MEANINGS.items()),
        "## Kinds of evidence and their tolerances",
        markdown_table(
            ["evidence", "tolerance and its reason", "n counts", "spread"],
            [[kind, rule.reason, rule.repeats, rule.spread] for kind, rule in RULES.items()],
        ),
        "A tolerance is in points for percentages, otherwise relative. Statements have bounds instead, which the "
        "verdict names. Kinds of published numbers:",
        markdown_list(f"**{kind}**: {meaning}" for kind, meaning in KIND_MEANINGS.items()),
        "## Measured with",
        markdown_list(measured_with(rows)),
    ]
    for paper, of_paper in groupby(rows, key=lambda row: row.number.paper):
        parts += [f"## {PAPERS[paper].title}", _table(by_item(of_paper))]
    return markdown_page(parts)


def measured_with(rows: Sequence[Row]) -> list[str]:
    """Return a line per commit, machine and versions, with the number of its rows."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_measured:
            versions = {key: value for key, value in row.environment.items() if key not in ("commit", "date")}
            about = f"commit `{row.commit or 'unknown'}`: {key_value_text(versions)}"
            groups.setdefault(about, []).append(row)
    lines = []
    for about, group in groups.items():
        dates = sorted({row.date or "unknown date" for row in group})
        lines.append(f"{len(group)} rows, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, {about}")
    return lines


def _table(items: dict[str, list[Row]]) -> str:
    """Return a line per item of a paper: its rows by state, what is off, and what its rows found."""
    lines: list[list[Cell]] = []
    for item, rows in items.items():
        counts = Counter(row.state for row in rows)
        states = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        evidence = ", ".join(dict.fromkeys(row.number.evidence for row in rows))
        findings = dict.fromkeys(row.number.finding for row in rows if row.number.finding)
        link = f"[{item}]({HTML}#{anchor(rows[0])})"
        lines.append([link, len(rows), evidence, states, " ".join(findings)])
    return markdown_table(["item", "rows", "evidence", "states", "findings"], lines)


def anchor(row: Row) -> str:
    """Return the anchor of a row in the HTML page."""
    return row.number.id.replace("/", "-")
