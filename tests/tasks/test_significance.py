"""The standard error of an accuracy is that of textbooks."""

from __future__ import annotations

import math
from statistics import pstdev

import pytest

from zoo.tasks.significance import standard_error


def test_the_standard_error_of_an_accuracy_is_that_of_a_binomial_share() -> None:
    assert standard_error(76.0, 50_000) == pytest.approx(0.191, abs=5e-4)  # at ImageNet's size, half of 0.38 points
    assert standard_error(50.0, 4) == pytest.approx(25.0)
    assert standard_error(100.0, 7) == standard_error(0.0, 7) == 0.0
    hits = [1] * 3 + [0] * 7
    assert standard_error(30.0, 10) == pytest.approx(100 * pstdev(hits) / math.sqrt(10))
