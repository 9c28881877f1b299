"""Published numbers and rows to test the scoreboard with."""

from __future__ import annotations

from typing import Any

import pytest

from zoo.reproduce.comparison import Comparison, State, Verdict
from zoo.reproduce.published_numbers import PublishedNumber
from zoo.reproduce.scoreboard import MeasuredBy, Row, Scoreboard

ENVIRONMENT = {"commit": "a" * 40, "date": "2026-03-04T05:06:07+00:00", "torch": "2.15.0", "cuda": None}


def number(key: str, value: Any = 7.24, paper: str = "revnet", **fields: Any) -> PublishedNumber:
    """Return a number of Table 3; ``fields`` are others of it."""
    given = {
        "item": "Table 3",
        "quantity": f"error of {key}",
        "unit": "%",
        "kind": "printed",
        "quotation": "7.14% 7.24%",
        "place": "Table 3, row 1",
    }
    return PublishedNumber(id=f"{paper}/{key}", value=value, **{**given, **fields})


def publish(monkeypatch: pytest.MonkeyPatch, *numbers: PublishedNumber) -> None:
    """Let these be the numbers that the papers publish."""

    def of_paper(paper: str) -> dict[str, PublishedNumber]:
        return {each.id.partition("/")[2]: each for each in numbers if each.paper == paper}

    monkeypatch.setattr("zoo.reproduce.scoreboard.published_numbers", of_paper)


def found(
    published: PublishedNumber | None, measured: Any = 7.3, state: State = "reproduced", **fields: Any
) -> Comparison:
    """Return a comparison; one that waits has nothing measured."""
    value = None if state in ("needs data", "needs training", "not built") else measured
    return Comparison("error", published, value, "%", Verdict(state, "as measured"), **fields)


def measured_by(section: str = "Table 3", **environment: Any) -> MeasuredBy:
    """Return what measured an item of the RevNet paper, in this environment."""
    return MeasuredBy(section, f"zoo reproduce revnet --only '{section}'", {**ENVIRONMENT, **environment})


def rows_of(*comparisons: Comparison) -> list[Row]:
    """Return the rows of a scoreboard, whose numbers `publish` has made, after these comparisons."""
    scoreboard = Scoreboard(["inplace_abn", "revnet"], {})
    for comparison in comparisons:
        scoreboard.add(comparison, measured_by())
    return list(scoreboard.rows.values())
