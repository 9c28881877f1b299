"""The scoreboard: one row per published number, with its latest measurement."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from zoo.reproduce.comparison import Comparison, State, Verdict, not_measured
from zoo.reproduce.published_numbers import Kind, PublishedNumber, published_numbers
from zoo.tables import number_text

#: States of a published number, in the order of the tables.
STATES: tuple[State, ...] = (
    "reproduced", "off", "underpowered", "needs data", "needs training", "not built", "not run",
)  # fmt: skip
#: States that do not replace an earlier measurement.
PENDING_STATES: tuple[State, ...] = ("needs data", "needs training", "not run")
DATE_LENGTH = len("2018-06-18")
NOT_REPORTED = "no measurement reports this number"


class Row(BaseModel):
    """A published number and its latest measurement.

    Args:
    - `id`, `paper`, `item`, `quantity`, `unit`, `kind`, `place`, `quotation`, `network`, `settings`: those of
      `zoo.reproduce.published_numbers.PublishedNumber`; `published` is its value.
    - `what`: name of the number in the report of the paper.
    - `measured`: the measured number in `measured_unit`, which may be more specific than `unit`; None if not measured.
    - `n`, `spread`: number of runs or repetitions, and their spread; see `zoo.reproduce.comparison.Comparison`.
    - `state`, `verdict`: the verdict as a state and as text.
    - `section`: the item of the paper's report that contains the row.
    - `command`: the command that measures the row.
    - `commit`, `date`: commit and date of the measurement; "" if its training runs do not record them.
    - `environment`: versions and machine of the measurement; empty if unknown.
    - `weights_md5`, `data`: digests of the scored weights and images, if any.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    paper: str
    item: str
    quantity: str
    published: int | float | str
    unit: str
    kind: Kind
    place: str
    quotation: str
    network: str
    settings: str
    what: str = ""
    measured: int | float | str | None = None
    measured_unit: str = ""
    n: int | None = None
    spread: float | None = None
    state: State
    verdict: str
    section: str = ""
    command: str
    commit: str = ""
    date: str = ""
    environment: dict[str, Any] = {}
    weights_md5: str = ""
    data: str = ""


class Scoreboard:
    """The rows of all papers by id, in the papers' order.

    A row is kept until its number is measured again. A state without a measurement does not replace a measurement, and
    a measurement without images does not replace one on given images.
    """

    def __init__(self, papers: Iterable[str], kept: Mapping[str, Row]) -> None:
        """Start with the rows ``kept`` from earlier runs whose published numbers have not changed."""
        numbers = [number for paper in papers for number in published_numbers(paper).values()]
        self.rows = {number.id: _continued(number, kept.get(number.id)) for number in numbers}
        self._named: set[str] = set()

    def add(self, comparison: Comparison, measured_by: MeasuredBy, *, is_part: bool = False) -> None:
        """Update the row of the comparison's number, unless this run has already updated it.

        With ``is_part``, only some of the paper's items are measured, and a row that belongs to another item is kept.
        """
        number = comparison.published
        if number is None or number.id in self._named:
            return
        old = self.rows[number.id]
        if is_part and old.section not in ("", measured_by.section):
            return
        self._named.add(number.id)
        new = _row(number, comparison, measured_by)
        says_less = new.state in PENDING_STATES or (old.data and not new.data)
        if old.measured is None or not says_less:
            self.rows[number.id] = new

    def complete(self, paper: str, measured_by: MeasuredBy) -> None:
        """Mark the numbers of a paper without a comparison as "not built"; called after all items were measured."""
        for number in published_numbers(paper).values():
            if number.id not in self._named:
                unnamed = not_measured("", number, number.unit, Verdict("not built", NOT_REPORTED))
                self.rows[number.id] = _row(number, unnamed, measured_by)


class MeasuredBy(NamedTuple):
    """The command that measured an item of a paper, and the `describe_environment` of the run."""

    section: str
    command: str
    environment: Mapping[str, Any]


def count_states(rows: Iterable[Row]) -> dict[State, int]:
    """Return the number of rows in each of `STATES`."""
    counts = Counter(row.state for row in rows)
    return {state: counts[state] for state in STATES}


def count_sentence(rows: Sequence[Row]) -> str:
    """Return a sentence with the number of rows in each state."""
    return f"Of {len(rows)} published numbers: {', '.join(counts_in_words(count_states(rows)))}."


def counts_in_words(counts: Mapping[State, int]) -> list[str]:
    """Return texts such as "5 off" and "3 need data" for the states that occur."""
    return [
        f"{count} {state if count == 1 else state.replace('needs', 'need')}" for state, count in counts.items() if count
    ]


def by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of a paper grouped by item, in order of first appearance."""
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row.item, []).append(row)
    return items


def _row(number: PublishedNumber, comparison: Comparison, measured_by: MeasuredBy) -> Row:
    """Return the row of a comparison. Provenance in the comparison takes precedence over ``measured_by``."""
    is_measured = comparison.measured is not None
    environment = measured_by.environment if comparison.environment is None else comparison.environment
    return Row(
        **_of_number(number),
        what=comparison.what,
        measured=comparison.measured,
        measured_unit=comparison.unit if is_measured else "",
        n=comparison.n if is_measured else None,
        spread=comparison.spread if is_measured else None,
        state=comparison.verdict.state,
        verdict=str(comparison.verdict),
        section=measured_by.section,
        command=comparison.command or measured_by.command,
        commit=str(environment.get("commit") or ""),
        date=(comparison.date or str(environment.get("date") or ""))[:DATE_LENGTH],
        environment={key: value for key, value in environment.items() if key not in ("commit", "date")},
        weights_md5=comparison.weights_md5,
        data=comparison.data,
    )


def _continued(number: PublishedNumber, old: Row | None) -> Row:
    """Return the row of an earlier run, or a "not run" row if the published number is new or has changed."""
    command = shlex.join(["zoo", "reproduce", number.paper])
    if old is None:
        return Row(**_of_number(number), state="not run", verdict=f"not run: `{command}`", command=command)
    if (old.published, old.unit) == (number.value, number.unit):
        return old.model_copy(update=_of_number(number))
    verdict = f"not run: the published number was {number_text(old.published)} {old.unit} when it was measured"
    return Row(**_of_number(number), state="not run", verdict=verdict, command=old.command or command)


def _of_number(number: PublishedNumber) -> dict[str, Any]:
    """Return the fields of a row that come from the published number."""
    return {**number.model_dump(exclude={"value"}), "paper": number.paper, "published": number.value}
