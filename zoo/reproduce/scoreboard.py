"""The scoreboard: one row per published number, with its measurements.

Rows are computed from the published numbers and the reports of the papers whenever they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from zoo.reproduce.comparison import Comparison, ReportSection, State, Verdict
from zoo.reproduce.published_numbers import Evidence, PublishedNumber, published_numbers
from zoo.tables import Cell, markdown_table, number_text

STATES: tuple[State, ...] = get_args(State)
FARTHEST_FIRST: tuple[State, ...] = ("off", "underpowered", "better", "reproduced", "not measured")
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)
DATE_LENGTH = len("2018-06-18")


@dataclass(frozen=True)
class Row:
    """A published number and its latest measurements.

    Args:
    - `number`: the published number.
    - `comparisons`: its measurements, or one comparison that says why there is none. If the rule or the method of the
      paper differs from this package's default, both are measured, the paper's first.
    - `section`: the section of the report with the comparisons; None if there is none.
    """

    number: PublishedNumber
    comparisons: Sequence[Comparison]
    section: ReportSection | None

    @property
    def farthest(self) -> Verdict:
        """The verdict on the measurement that is farther from the paper."""
        return min((each.verdict for each in self.comparisons), key=lambda verdict: FARTHEST_FIRST.index(verdict.state))

    @property
    def state(self) -> State:
        """The state of the measurement that is farther from the paper."""
        return self.farthest.state

    @property
    def is_measured(self) -> bool:
        """Whether there is a measurement."""
        return self.comparisons[0].measured is not None

    @property
    def command(self) -> str:
        """The command that measures it."""
        of_section = self.section.command if self.section else f"zoo reproduce {self.number.paper}"
        return self.comparisons[0].command or of_section

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions and machine of the measurement, with its commit; empty if it is unknown or not measured."""
        known = self.comparisons[0].environment or (self.section.environment if self.section else {})
        return known if self.is_measured else {}

    @property
    def date(self) -> str:
        """Date of the measurement; "" if unknown."""
        date = self.comparisons[0].date or str(self.environment.get("date") or "")
        return date[:DATE_LENGTH] if self.is_measured else ""


def rows_of(sections: Mapping[str, Iterable[ReportSection]]) -> list[Row]:
    """Return a row for each published number of the papers, given the ``sections`` of their reports."""
    rows = []
    for paper, of_paper in sections.items():
        found: dict[str, list[tuple[Comparison, ReportSection]]] = {}
        for section in of_paper:
            for comparison in section.comparisons:
                found.setdefault(comparison.published.id, []).append((comparison, section))
        rows += [_row(number, found.get(number.id, [])) for number in published_numbers(paper).values()]
    return rows


def _row(number: PublishedNumber, found: Sequence[tuple[Comparison, ReportSection]]) -> Row:
    if not found:
        pending = f"`zoo reproduce {number.paper}`"
        return Row(number, [Comparison(number.quantity, None, number, pending=pending)], None)
    measured = [each for each in found if each[0].measured is not None] or found[:1]
    return Row(number, [comparison for comparison, _ in measured], measured[0][1])


def counts_by_evidence(rows: Sequence[Row]) -> list[list[Cell]]:
    """Return the headers, and one line per kind of evidence with its numbers of rows by state."""
    lines: list[list[Cell]] = [["evidence", "numbers", *STATES]]
    for evidence in EVIDENCE:
        counts = Counter(row.state for row in rows if row.number.evidence == evidence)
        lines.append([evidence, counts.total(), *(counts[state] for state in STATES)])
    return lines


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """Return one line with the numbers of rows by state, and one line for each row that is off."""
    counts = Counter(row.state for row in rows)
    missing = counts.pop("not measured", 0)
    states = ", ".join(f"{counts[state]} {state}" for state in STATES if state != "not measured")
    lines = [f"Of {len(rows)} published numbers, {len(rows) - missing} are measured: {states}."]
    for row in (row for row in rows if row.state == "off"):
        number, (found,) = row.number, [each for each in row.comparisons if each.verdict == row.farthest][:1]
        published, measured = _with_units(found)
        lines.append(f"{number.paper}, {number.item}: {found.what}: {measured}, published {published}")
    return lines


def measured_table(comparisons: Iterable[Comparison]) -> str:
    """Return a Markdown table of published numbers, measured numbers and verdicts; "" if nothing was measured."""
    lines = [
        [f"{each.published.paper}, {each.published.item}", each.what, *_with_units(each), str(each.verdict)]
        for each in comparisons
        if each.measured is not None
    ]
    return markdown_table(["item", "number", "published", "measured", "verdict"], lines) if lines else ""


def _with_units(comparison: Comparison) -> tuple[str, str]:
    """Return the published and the measured number."""
    number = comparison.published
    texts = (number.text, number_text(comparison.measured))
    published, measured = (f"{text} {number.unit}".strip() for text in texts)
    return published, measured


def by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of a paper grouped by item, in order of first appearance."""
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row.number.item, []).append(row)
    return items
