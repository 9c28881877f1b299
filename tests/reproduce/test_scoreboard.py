"""The scoreboard has a row for each published number, by the paper's rule and as shipped here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reproduce.scoreboards import found, number, publish, rows, section, waiting
from zoo.reproduce.comparison import Basis
from zoo.reproduce.scoreboard import RATES, count_sentence, counts_by_evidence

ONE = number("table3/one")
TWO = number("table5/two", 100, unit="MB", evidence="memory predicted", finding="It is less.")
MISSING = number("table1/three", 1, "inplace_abn")


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, ONE, TWO, MISSING)


def test_every_published_number_has_a_row_in_the_order_of_the_papers() -> None:
    states = {id: row.state for id, row in rows().items()}
    assert states == {MISSING.id: "not run", ONE.id: "not run", TWO.id: "not run"}
    assert rows()[ONE.id].command == "zoo reproduce revnet"


def test_a_row_has_the_measured_number_and_where_it_is_from() -> None:
    row = rows(section(found(ONE)))[ONE.id]
    assert (row.paper.measured, row.state, row.is_one) == (7.3, "reproduced", True)
    assert (row.commit, row.date) == ("a" * 40, "2026-03-04")
    assert row.command == "zoo reproduce revnet --only 'Table 3'"


def test_what_was_read_from_runs_has_their_commit_and_what_was_read_from_a_report_its_command() -> None:
    of_runs = rows(section(found(ONE, environment={"commit": "b" * 40})))[ONE.id]
    assert (of_runs.commit, of_runs.date) == ("b" * 40, "")
    of_report = rows(section(found(ONE, date="2025-01-01T00:00:00", command="zoo reproduce imagenet")))[ONE.id]
    assert (of_report.date, of_report.command) == ("2025-01-01", "zoo reproduce imagenet")


@pytest.mark.parametrize(
    ("paper", "shipped", "state"),
    [(100, 50, "better"), (50, 100, "better"), (100, 200, "off"), (200, 50, "off"), (100, 101, "reproduced")],
)
def test_a_row_is_no_better_than_the_worse_of_both_measurements(paper: float, shipped: float, state: str) -> None:
    for order in (1, -1):
        bases: list[tuple[Basis, float]] = [("paper", paper), ("shipped", shipped)]
        both = [found(TWO, value, basis=basis, spread=None) for basis, value in bases][::order]
        row = rows(section(*both))[TWO.id]
        assert (row.paper.measured, row.shipped.measured, row.state) == (paper, shipped, state)


def test_the_first_comparison_of_a_basis_is_the_row() -> None:
    row = rows(section(found(TWO, 100, spread=None), found(TWO, 300, spread=None)))[TWO.id]
    assert (row.paper.measured, row.is_one) == (100, True)


def test_numbers_are_counted_by_evidence_and_by_the_papers_rule_and_as_shipped() -> None:
    two = [found(TWO, 100, basis="paper", spread=None), found(TWO, 50, basis="shipped", spread=None)]
    of_all = list(rows(section(found(ONE), *two)).values())
    headers, *lines = counts_by_evidence(of_all)
    assert headers == [
        "evidence",
        "numbers",
        "reproduced",
        "better",
        "agrees",
        "underpowered",
        "off",
        "not measured",
    ]
    counts = {line[0]: line[1:] for line in lines}
    assert counts["memory predicted"] == [1, "1 / 0", "0 / 1", "0", "0", "0", 0]
    assert counts["accuracy trained"] == [2, "1", "0", "0", "0", "0", 1]
    assert counts["all"] == [3, "", "", "", "", "", 1], "kinds have no common count"
    assert count_sentence(of_all) == (
        "Of 3 published numbers, 2 are measured. Reproduced: 0 of 1 (memory predicted), 1 of 1 (accuracy trained)."
    )


def test_a_missing_training_has_its_hours() -> None:
    row = rows(section(waiting(ONE)))[ONE.id]
    assert row.cost == ""
    costly = replace(waiting(ONE), operations=RATES[""]["core"][0] * 7200)
    assert rows(section(costly))[ONE.id].cost.partition(": ")[2].startswith("about 2 hours on one core, ")
