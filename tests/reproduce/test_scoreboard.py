"""The scoreboard has a row for each published number, with its measurements."""

from __future__ import annotations

import pytest

from tests.reproduce.scoreboards import found, number, publish, rows, section, waiting
from zoo.reproduce.scoreboard import counts_by_evidence, verdict_lines

ONE = number("table3/one")
TWO = number("table5/two", 100, unit="MB", evidence="memory predicted", finding="It is less.")
MISSING = number("table1/three", 1, "inplace_abn")


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, ONE, TWO, MISSING)


def test_every_published_number_has_row_in_the_order_of_papers() -> None:
    states = {id: row.state for id, row in rows().items()}
    assert states == {MISSING.id: "not measured", ONE.id: "not measured", TWO.id: "not measured"}
    assert rows()[ONE.id].command == "zoo reproduce revnet"


def test_row_has_measured_number_and_provenance() -> None:
    row = rows(section(found(ONE)))[ONE.id]
    assert (row.comparisons[0].measured, row.state) == (7.3, "reproduced")
    assert (row.environment["commit"], row.date) == ("a" * 40, "2026-03-04")
    assert row.command == "zoo reproduce revnet --only 'Table 3'"


def test_measurements_have_commit_or_command() -> None:
    of_runs = rows(section(found(ONE, environment={"commit": "b" * 40})))[ONE.id]
    assert (of_runs.environment["commit"], of_runs.date) == ("b" * 40, "")
    of_report = rows(section(found(ONE, date="2025-01-01T00:00:00", command="zoo reproduce imagenet")))[ONE.id]
    assert (of_report.date, of_report.command) == ("2025-01-01", "zoo reproduce imagenet")


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [(100, 50, "better"), (50, 100, "better"), (100, 200, "off"), (200, 50, "off"), (100, 101, "reproduced")],
)
def test_row_counts_as_measurement_farther_from_paper(first: float, second: float, state: str) -> None:
    row = rows(section(*(found(TWO, value, spread=None) for value in (first, second))))[TWO.id]
    assert ([each.measured for each in row.comparisons], row.state) == ([first, second], state)


def test_pending_comparison_does_not_replace_measurement() -> None:
    row = rows(section(waiting(ONE), found(ONE)))[ONE.id]
    assert ([each.measured for each in row.comparisons], row.state) == ([7.3], "reproduced")


def test_numbers_are_counted_by_evidence_and_mismatches_named() -> None:
    of_all = list(rows(section(found(ONE), found(TWO, 100, spread=None), found(TWO, 200, spread=None))).values())
    headers, *lines = counts_by_evidence(of_all)
    assert headers == ["evidence", "numbers", "reproduced", "better", "off", "underpowered", "not measured"]
    counts = {line[0]: line[1:] for line in lines}
    assert counts["memory predicted"] == [1, 0, 0, 1, 0, 0]
    assert counts["accuracy trained"] == [2, 1, 0, 0, 0, 1]
    assert verdict_lines(of_all) == [
        "Of 3 published numbers, 2 are measured: 1 reproduced, 0 better, 1 off, 0 underpowered.",
        "revnet, Table 3: error: 200 MB, published 100 MB",
    ]
