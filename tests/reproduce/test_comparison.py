"""A verdict follows from the published number, its kind of evidence, and the measurement."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reproduce.scoreboards import number
from zoo.reproduce.comparison import Comparison, Verdict


def state(measured: Any, value: Any = 100, spread: float | None = None, **fields: Any) -> str:
    return Comparison("a", measured, number("a", value, **{"unit": "", **fields}), n=3, spread=spread).verdict.state


@pytest.mark.parametrize(
    ("evidence", "within", "beyond", "beyond_state"),
    [
        ("count", 105, 105.1, "off"), ("count", 95, 94.9, "off"),
        ("parameters", 101, 101.1, "off"), ("memory predicted", 110, 110.1, "off"),
        ("memory predicted", 90, 89.9, "better"), ("memory measured", 90, 80, "better"),
        ("time measured", 101, 101.1, "off"), ("time measured", 99, 98.9, "better"),
        ("signal-to-noise measured", 51, 49, "off"), ("signal-to-noise measured", 199, 201, "better"),
    ],
)  # fmt: skip
def test_evidence_kinds_have_tolerance_and_better_direction(
    evidence: str, within: float, beyond: float, beyond_state: str
) -> None:
    assert state(within, evidence=evidence, spread=0.0) == "reproduced"
    assert state(beyond, evidence=evidence, spread=0.0) == beyond_state


def test_number_may_override_its_better_direction() -> None:
    assert state(120, evidence="memory predicted", better="more") == "better"
    assert state(80, evidence="memory predicted", better="more") == "off"
    assert state(80, evidence="memory predicted", better="neither") == "off"


def test_percentage_has_tolerance_in_points() -> None:
    assert state(58.0, 50, unit="%", evidence="memory predicted") == "reproduced"
    assert state(61.0, 50, unit="%", evidence="memory predicted") == "off"
    assert state(76.93, 77.04, unit="%", evidence="accuracy scored", spread=0.0) == "off"


def test_bounds_replace_tolerance() -> None:
    at_least_ten = {"value": "ten times", "evidence": "memory predicted", "at_least": 10, "better": "more"}
    assert (state(10, **at_least_ten), state(9.9, **at_least_ten)) == ("reproduced", "off")
    in_range = {"value": "1.5-2", "evidence": "time measured", "at_least": 1.5, "at_most": 2, "spread": 0.02}
    assert [state(ratio, **in_range) for ratio in (1.4, 1.7, 2.3)] == ["better", "reproduced", "off"]
    assert state(1.505, **in_range) == "underpowered"


def test_rounded_numbers_equal_printed_parameters() -> None:
    assert state(0.47506, 0.48, evidence="parameters") == "reproduced"
    assert state(37.749, 37, evidence="parameters") == "reproduced", "cut off"
    assert state(1.4, 1, evidence="parameters") == "off", "one digit is taken as exact"
    assert state(9.5, 9, evidence="count") == "off", "within the tolerance of counts alone"


def test_statements_are_judged_by_equality() -> None:
    statement = number("a", "x and z", evidence="count")
    assert Comparison("a", "x and z", statement).verdict == Verdict("reproduced", "equal")
    assert Comparison("a", "x", statement).verdict == Verdict("off", "another one")


@pytest.mark.parametrize(
    ("measured", "spread", "n", "verdict"),
    [
        (7.4, 0.1, 3, "reproduced: +0.16 points"), (7.4, 0.1, 2, "underpowered: +0.16 points, 2 of 3 runs"),
        (7.9, 0.5, 3, "underpowered: +0.66 points, standard error 0.5"), (9.0, 0.1, 1, "off: +1.76 points"),
        (7.3, None, 3, "underpowered: +0.06 points, standard error unknown"), (6.0, 0.1, 3, "off: -1.24 points"),
    ],
)  # fmt: skip
def test_accuracy_is_judged_within_two_standard_errors(
    measured: float, spread: float | None, n: int, verdict: str
) -> None:
    published = number("a", 7.24, unit="%", evidence="accuracy trained")
    assert str(Comparison("a", measured, published, spread=spread, n=n).verdict) == verdict
