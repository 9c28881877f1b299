"""Published numbers, comparisons and reports to test the scoreboard with."""

from __future__ import annotations

from typing import Any

import pytest

from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.published_numbers import PublishedNumber
from zoo.reproduce.scoreboard import Row, rows_of

ENVIRONMENT = {"commit": "a" * 40, "date": "2026-03-04T05:06:07+00:00", "torch": "2.15.0", "cuda": None}


def number(key: str, value: Any = 7.24, paper: str = "revnet", **fields: Any) -> PublishedNumber:
    """Return a number of Table 3; ``fields`` replace its other fields."""
    given = {
        "item": "Table 3",
        "quantity": f"error of {key}",
        "unit": "%",
        "kind": "printed",
        "evidence": "accuracy trained",
        "quotation": "7.14% 7.24%",
        "place": "Table 3, row 1",
    }
    return PublishedNumber(id=f"{paper}/{key}", value=value, **{**given, **fields})


def publish(monkeypatch: pytest.MonkeyPatch, *numbers: PublishedNumber) -> None:
    """Replace the published numbers of the papers."""

    def of_paper(paper: str) -> dict[str, PublishedNumber]:
        return {each.id.partition("/")[2]: each for each in numbers if each.paper == paper}

    for module in ("scoreboard", "paper_report", "measurements"):
        monkeypatch.setattr(f"zoo.reproduce.{module}.published_numbers", of_paper)


def found(published: PublishedNumber, measured: Any = 7.3, **fields: Any) -> Comparison:
    """Return a comparison with a standard error of 0.1 points."""
    return Comparison("error", measured, published, **{"spread": 0.1, "n": 3, **fields})


def waiting(published: PublishedNumber) -> Comparison:
    """Return the comparison of a number that was not measured."""
    return Comparison("error", None, published, pending="`zoo train x DATA`")


def section(*comparisons: Comparison, key: str = "table3", **environment: Any) -> ReportSection:
    """Return a section of a report on the RevNet paper, measured in this environment."""
    command = "zoo reproduce revnet --only 'Table 3'"
    return ReportSection(key, "Table 3", list(comparisons), command=command, environment={**ENVIRONMENT, **environment})


def rows(*sections: ReportSection) -> dict[str, Row]:
    """Return the rows by id, for the numbers of `publish`."""
    return {row.number.id: row for row in rows_of({"inplace_abn": [], "revnet": sections})}
