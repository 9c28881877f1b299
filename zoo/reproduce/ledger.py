"""The ledger: a row for each number that the papers publish, with what was measured of it last."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from zoo.reproduce.comparison import Comparison, State, Verdict, not_measured
from zoo.reproduce.published_numbers import Kind, PublishedNumber, published_numbers
from zoo.tables import number_text

#: What can become of a published number, in the order in which they are counted.
STATES: tuple[State, ...] = (
    "reproduced", "off", "underpowered", "needs data", "needs training", "not built", "not run",
)  # fmt: skip
#: States of numbers that this package could measure. They say nothing about a number that was measured before.
WAITING: tuple[State, ...] = ("needs data", "needs training", "not run")
DAY = len("2018-06-18")
UNNAMED = "no measurement names it"


class Row(BaseModel):
    """A published number, and what was measured of it last.

    Args:
    - `id`, `paper`, `item`, `quantity`, `unit`, `kind`, `place`, `quotation`, `network`, `settings`: those of
      `zoo.reproduce.published_numbers.PublishedNumber`; `published` is its value.
    - `what`: the name of the measured number in the report of the paper.
    - `measured`: None where nothing was measured; in the unit `measured_unit`, which may say more than `unit`.
    - `n`, `spread`: runs or repetitions, and how far they scatter, see `zoo.reproduce.comparison.Comparison`.
    - `state`, `verdict`: what follows, as a word and in words.
    - `section`: the item of the paper's report that the row is of.
    - `command`: what measures the row.
    - `commit`, `date`: of the code, and when; "" where the training runs that it was read from do not say.
    - `environment`: the versions and the machine that it was measured with; empty where that is not known.
    - `weights_md5`, `data`: the weights and the images that were scored, if any.
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


class Ledger:
    """The rows of all papers by the ids of their numbers, in the papers' order.

    A row stays as it is until its number is measured again. What was measured is not replaced by the word that data or
    training are needed, nor what was measured on given images by what was measured without.
    """

    def __init__(self, papers: Iterable[str], kept: Mapping[str, Row]) -> None:
        """Take over the rows that were ``kept`` from earlier runs, as far as their published numbers are the same."""
        numbers = [number for paper in papers for number in published_numbers(paper).values()]
        self.rows = {number.id: _continued(number, kept.get(number.id)) for number in numbers}
        self._named: set[str] = set()

    def add(self, comparison: Comparison, measured_by: MeasuredBy, *, is_part: bool = False) -> None:
        """Let the comparison be the row of its number, if it is the first of this run that names it.

        With ``is_part``, only some of the paper's items are measured: the first comparison of the number may be in
        another item, which then keeps its row.
        """
        number = comparison.published
        if number is None or number.id in self._named:
            return
        old = self.rows[number.id]
        if is_part and old.section not in ("", measured_by.section):
            return
        self._named.add(number.id)
        new = _row(number, comparison, measured_by)
        says_less = new.state in WAITING or (old.data and not new.data)
        if old.measured is None or not says_less:
            self.rows[number.id] = new

    def complete(self, paper: str, measured_by: MeasuredBy) -> None:
        """Call the numbers of a paper not built that no comparison named, once all its items were measured."""
        for number in published_numbers(paper).values():
            if number.id not in self._named:
                unnamed = not_measured("", number, number.unit, Verdict("not built", UNNAMED))
                self.rows[number.id] = _row(number, unnamed, measured_by)


class MeasuredBy(NamedTuple):
    """What measured an item of a paper: the command for this item, and `describe_environment` of the run."""

    section: str
    command: str
    environment: Mapping[str, Any]


def count_states(rows: Iterable[Row]) -> dict[State, int]:
    """Return how many rows are in each of `STATES`."""
    counts = Counter(row.state for row in rows)
    return {state: counts[state] for state in STATES}


def count_sentence(rows: Sequence[Row]) -> str:
    """Return how many of the numbers are in each state, as a sentence."""
    return f"Of {len(rows)} published numbers: {', '.join(counts_in_words(count_states(rows)))}."


def counts_in_words(counts: Mapping[State, int]) -> list[str]:
    """Return "5 off", "3 need data" and so on, for the states that there are."""
    return [
        f"{count} {state if count == 1 else state.replace('needs', 'need')}" for state, count in counts.items() if count
    ]


def by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of a paper by the item that they belong to, in the order in which the items begin."""
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row.item, []).append(row)
    return items


def _row(number: PublishedNumber, comparison: Comparison, measured_by: MeasuredBy) -> Row:
    """Return the row of a comparison; what it was read from says by itself when and how it was measured."""
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
        date=(comparison.date or str(environment.get("date") or ""))[:DAY],
        environment={key: value for key, value in environment.items() if key not in ("commit", "date")},
        weights_md5=comparison.weights_md5,
        data=comparison.data,
    )


def _continued(number: PublishedNumber, old: Row | None) -> Row:
    """Return the row of an earlier run, or one that waits for a run: the published number is new or another one."""
    command = shlex.join(["zoo", "reproduce", number.paper])
    if old is None:
        return Row(**_of_number(number), state="not run", verdict=f"not run: `{command}`", command=command)
    if (old.published, old.unit) == (number.value, number.unit):
        return old.model_copy(update=_of_number(number))
    verdict = f"not run: it was measured when {number_text(old.published)} {old.unit} stood here as published"
    return Row(**_of_number(number), state="not run", verdict=verdict, command=old.command or command)


def _of_number(number: PublishedNumber) -> dict[str, Any]:
    """Return the fields of a row that are those of the published number."""
    return {**number.model_dump(exclude={"value"}), "paper": number.paper, "published": number.value}
