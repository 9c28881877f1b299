"""The scoreboard: one row per published number, with what was measured by the paper's rule and as shipped here.

Rows are computed from the published numbers and the reports of the papers whenever they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from zoo.reproduce.comparison import RULES, Comparison, Section, State, Verdict, not_measured
from zoo.reproduce.published_numbers import Evidence, PublishedNumber, published_numbers
from zoo.tables import Cell, number_text

#: States of a measured number, from the one that a row with two of them is known by to the best.
JUDGED: tuple[State, ...] = ("off", "underpowered", "agrees", "better", "reproduced")
#: States of a number that was not measured.
UNMEASURED: tuple[State, ...] = ("needs data", "needs training", "not built", "not run")
STATES = (*reversed(JUDGED), *UNMEASURED)
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)
DATE_LENGTH = len("2018-06-18")
# Operations per second of a training step, good for hours within a factor of 1.5, and the result file with its
# time, by a part of the name of the network.
RATES: Mapping[str, Mapping[str, tuple[float, str]]] = {
    "revnext": {"core": (9.2e10, "model_cifar")},
    "cifar": {"core": (5.4e10, "model_cifar")},
    "": {"core": (5.9e10, "model_cpu"), "H100": (9.7e13, "model_h100")},  # ResNet-50
}


@dataclass(frozen=True)
class Row:
    """A published number and its latest measurements.

    Args:
    - `number`: the published number.
    - `paper`: the measurement by the rule of the paper, or the reason why there is none.
    - `shipped`: the measurement of what this package does by default; the same one if there is no difference.
    - `section`: the section of the report that they are from; None if there is none.
    """

    number: PublishedNumber
    paper: Comparison
    shipped: Comparison
    section: Section | None

    @property
    def is_one(self) -> bool:
        """Whether the paper's rule and the defaults of this package are the same, or only one of them applies."""
        return self.paper is self.shipped

    @property
    def state(self) -> State:
        """The worse state of both measurements."""
        states = [each.verdict.state for each in (self.paper, self.shipped)]
        return next((state for state in JUDGED if state in states), states[0])

    @property
    def is_measured(self) -> bool:
        """Whether there is a measurement."""
        return self.paper.measured is not None

    @property
    def command(self) -> str:
        """The command that measures it."""
        return self.paper.command or (self.section.command if self.section else f"zoo reproduce {self.number.paper}")

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions and machine of the measurement, with its commit; empty if unknown."""
        return self.paper.environment or (self.section.environment if self.section else {})

    @property
    def commit(self) -> str:
        """Commit of the measurement; "" if unknown."""
        return str(self.environment.get("commit") or "") if self.is_measured else ""

    @property
    def date(self) -> str:
        """Date of the measurement; "" if unknown."""
        date = self.paper.date or str(self.environment.get("date") or "")
        return date[:DATE_LENGTH] if self.is_measured else ""

    @property
    def cost(self) -> str:
        """What the missing training takes, from its operations; "" if none is missing or they are unknown."""
        operations = self.paper.operations
        if self.is_measured or operations is None:
            return ""
        rates = next(rates for part, rates in RATES.items() if part in self.number.network)
        hours = ", ".join(
            f"{number_text(float(f'{operations / rate / 3600:.2g}'))} hours on one {machine}"
            for machine, (rate, _) in rates.items()
        )
        return f"{operations:.1e} operations: about {hours}"


def rows_of(sections: Mapping[str, Iterable[Section]]) -> list[Row]:
    """Return a row for each published number of the papers, given the ``sections`` of their reports."""
    rows = []
    for paper, of_paper in sections.items():
        found: dict[str, list[tuple[Comparison, Section]]] = {}
        for section in of_paper:
            for comparison in section.comparisons:
                if comparison.published is not None:
                    found.setdefault(comparison.published.id, []).append((comparison, section))
        rows += [_row(number, found.get(number.id, [])) for number in published_numbers(paper).values()]
    return rows


def _row(number: PublishedNumber, found: Sequence[tuple[Comparison, Section]]) -> Row:
    """Return the row of a number, from the first comparison of each basis."""
    if not found:
        missing = Verdict("not run", f"`zoo reproduce {number.paper}`")
        nothing = not_measured(number.quantity, number, number.unit, missing)
        return Row(number, nothing, nothing, None)

    def first(*bases: str) -> tuple[Comparison, Section]:
        return next((each for each in found if each[0].basis in bases), found[0])

    (paper, section), (shipped, _) = first("paper", "both"), first("shipped", "both")
    return Row(number, paper, shipped, section)


def counts_by_evidence(rows: Sequence[Row]) -> list[list[Cell]]:
    """Return the headers, a line per kind of evidence with its numbers by state, and a line for all kinds.

    A measured number counts twice: by the paper's rule and as shipped here ("12 / 10"), unless both counts are equal.
    """
    lines: list[list[Cell]] = [["evidence", "numbers", *reversed(JUDGED), "not measured"]]
    for evidence in (*EVIDENCE, "all"):
        of_kind = [row for row in rows if evidence in (row.number.evidence, "all")]
        sides = [Counter(each.verdict.state for each in side)
                 for side in ([row.paper for row in of_kind], [row.shipped for row in of_kind])]  # fmt: skip
        pairs = [[side[state] for side in sides] for state in reversed(JUDGED)]
        cells: list[Cell] = [str(a) if a == b else f"{a} / {b}" for a, b in pairs]
        if evidence == "all":  # different kinds of evidence have no common count
            cells = [""] * len(pairs)
        lines.append([evidence, len(of_kind), *cells, sum(not row.is_measured for row in of_kind)])
    return lines


def count_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence with the number of measured rows by kind of evidence."""
    measured = Counter(row.number.evidence for row in rows if row.is_measured)
    agreeing = Counter(row.number.evidence for row in rows if row.state == "reproduced")
    kinds = [f"{agreeing[kind]} of {measured[kind]} ({kind})" for kind in EVIDENCE if measured[kind]]
    return f"Of {len(rows)} published numbers, {sum(measured.values())} are measured. Reproduced: {', '.join(kinds)}."


def by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of a paper grouped by item, in order of first appearance."""
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row.number.item, []).append(row)
    return items


def repeats_text(row: Row) -> str:
    """Return what n counts and n, such as "deterministic" or "25 rounds"."""
    repeats = RULES[row.number.evidence].repeats
    return "" if not row.is_measured else repeats if repeats == "deterministic" else f"{row.paper.n} {repeats}"
