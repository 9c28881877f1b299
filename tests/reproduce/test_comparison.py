"""A verdict says how far a measured number is from the published one."""

from __future__ import annotations

import pytest

from tests.reproduce.scoreboards import number
from zoo.reproduce.comparison import (
    Comparison,
    Verdict,
    compare,
    compare_decades,
    compare_maximum,
    compare_minimum,
    not_measured,
    unpublished,
)


@pytest.mark.parametrize(
    ("comparison", "state", "words"),
    [
        (compare("a", number("a", 100), 101.0, "", 0.02), "reproduced", "reproduced: within 2 %"),
        (compare("a", number("a", 100), 95.0, "", 0.02), "off", "off by -5.0 %"),
        (compare_minimum("a", number("a", 3.6), 3.6, ""), "reproduced", "reproduced: at least as large"),
        (compare_minimum("a", number("a", 3.6), 1.8, ""), "off", "off by -50.0 %"),
        (compare_maximum("a", number("a", 100), 101, "", 0.02), "reproduced", "reproduced: within 2 %"),
        (compare_maximum("a", number("a", 100), 80, "", 0.02), "reproduced", "reproduced: less by 20.0 %"),
        (compare_maximum("a", number("a", 100), 110, "", 0.02), "off", "off by +10.0 %"),
        (compare_decades("a", number("a", 1e9), 1.9e9), "reproduced", "reproduced: within a factor of 2"),
        (compare_decades("a", number("a", 1e9), 4e8), "off", "off by a factor of 0.4"),
        (unpublished("a", 1.0), "nothing published", "nothing published"),
    ],
)
def test_verdicts_say_how_far_a_number_is_from_the_published_one(
    comparison: Comparison, state: str, words: str
) -> None:
    assert (comparison.verdict.state, str(comparison.verdict)) == (state, words)


def test_a_number_that_was_not_measured_says_why() -> None:
    comparison = not_measured("a", number("a"), "%", Verdict("needs training", "`zoo train x DATA`"))
    assert (comparison.measured, str(comparison.verdict)) == (None, "needs training: `zoo train x DATA`")
