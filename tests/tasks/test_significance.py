"""Standard errors and the exact test of a paired difference are those of textbooks and of a count of all cases."""

from __future__ import annotations

import math
import random
from itertools import product
from statistics import mean, pstdev, stdev

import pytest

from zoo.tasks.significance import PairedTest, mcnemar_p_value, paired_test, standard_error


def test_the_standard_error_of_an_accuracy_is_that_of_a_binomial_share() -> None:
    assert standard_error(76.0, 50_000) == pytest.approx(0.191, abs=5e-4)  # at ImageNet's size, half of 0.38 points
    assert standard_error(50.0, 4) == pytest.approx(25.0)
    assert standard_error(100.0, 7) == standard_error(0.0, 7) == 0.0
    hits = [1] * 3 + [0] * 7
    assert standard_error(30.0, 10) == pytest.approx(100 * pstdev(hits) / math.sqrt(10))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 1), (0, 5), (0, 6), (2, 7), (4, 4), (6, 5), (3, 11)])
def test_the_p_value_is_the_share_of_all_outcomes_that_are_as_unequal(first: int, second: int) -> None:
    """Each image that one of two has right could as well be the other's: all 2^n ways to share them are counted."""
    outcomes = [sum(sides) for sides in product((0, 1), repeat=first + second)]
    center = (first + second) / 2
    extreme = [outcome for outcome in outcomes if abs(outcome - center) >= abs(first - center)]
    assert mcnemar_p_value(first, second) == pytest.approx(len(extreme) / len(outcomes), rel=1e-12)
    assert mcnemar_p_value(second, first) == mcnemar_p_value(first, second)


def test_known_values_of_the_exact_test() -> None:
    """Agresti's survey of a president's approval has 150 and 86; exact2x2 of R and statsmodels give these p-values."""
    assert mcnemar_p_value(86, 150) == pytest.approx(3.716e-05, rel=1e-3)
    assert mcnemar_p_value(121, 59) == pytest.approx(4.434e-06, rel=1e-3)
    assert mcnemar_p_value(0, 0) == 1.0


def test_a_paired_difference_has_the_mean_and_standard_error_of_the_images_differences() -> None:
    generator = random.Random(0)
    first, second = ([generator.random() < share for _ in range(400)] for share in (0.7, 0.75))
    test = paired_test(first, second)
    differences = [100 * (int(other) - int(one)) for one, other in zip(first, second, strict=True)]
    assert test.difference == pytest.approx(mean(differences))
    assert test.standard_error == pytest.approx(stdev(differences) / math.sqrt(400), rel=2e-3)  # n for n - 1


def test_the_verdict_says_who_is_better_or_what_could_have_been_seen() -> None:
    assert PairedTest(1000, 10, 30).verdict("A", "B") == "B is better by 2.00 ± 0.63 points, p = 0.0022"
    assert PairedTest(1000, 40, 0).verdict("A", "B") == "A is better by 4.00 ± 0.62 points, p < 0.0001"
    text = PairedTest(10_000, 90, 110).verdict("A", "B")
    assert text.startswith("no difference is shown (0.20 ± 0.14 points, p = 0.18); these 10,000 images would show")
    assert text.endswith("one of about 0.40 points with a probability of 80 %")
