"""Statistical significance of scores: standard errors, and an exact paired test of a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.05  # significance level
POWER = 0.8  # probability of detecting a difference of the detectable size


def standard_error(percent: float, count: int) -> float:
    """Return the binomial standard error, in percentage points, of ``percent`` of ``count`` independent images.

    It is 0, and meaningless, at 0 and 100 percent.
    """
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / count)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test, from the numbers of images that only one has right.

    If both networks are equally good, each of these n images is equally likely to be in either group. The p-value is
    the probability of groups at least as unequal: min(1, 2 P(X <= smaller group)) with X ~ Binomial(n, 1/2), summed
    exactly in integers.
    """
    total, smaller = only_first + only_second, min(only_first, only_second)
    ways, term = 0, 1  # of choosing up to ``smaller`` of ``total`` images
    for chosen in range(smaller + 1):
        ways += term
        term = term * (total - chosen) // (chosen + 1)
    return min(1.0, 2 * ways / 2**total)


@dataclass(frozen=True)
class PairedTest:
    """Paired comparison of two sets of predictions for the same images; differences are second minus first.

    Args:
    - `count`: number of images.
    - `only_first`: images that only the first has right.
    - `only_second`: images that only the second has right.
    """

    count: int
    only_first: int
    only_second: int

    @property
    def difference(self) -> float:
        """Difference of the two accuracies, in percentage points."""
        return 100 * (self.only_second - self.only_first) / self.count

    @property
    def standard_error(self) -> float:
        """Standard error of the paired difference, in percentage points."""
        variance = self.only_first + self.only_second - (self.only_second - self.only_first) ** 2 / self.count
        return 100 * math.sqrt(max(0.0, variance)) / self.count

    @property
    def p_value(self) -> float:
        """Probability of a difference at least as large by chance alone, see `mcnemar_p_value`."""
        return mcnemar_p_value(self.only_first, self.only_second)

    @property
    def is_shown(self) -> bool:
        """Whether the difference is statistically significant at `LEVEL`."""
        return self.p_value < LEVEL

    @property
    def detectable(self) -> float:
        """Smallest difference, in percentage points, that the test detects with probability `POWER`.

        About 2.8 standard errors, given as many images on which the two disagree. At least 6 images, the fewest with
        which the test can be significant, when all of them are in one group.
        """
        deviations = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)
        fewest = next(number for number in range(1, 100) if mcnemar_p_value(0, number) < LEVEL)
        return 100 * max(fewest, deviations * math.sqrt(self.only_first + self.only_second)) / self.count

    def verdict(self, first: str, second: str) -> str:
        """Return the conclusion as a sentence; ``first`` and ``second`` are the names of the two."""
        size = f"{abs(self.difference):.2f} ± {self.standard_error:.2f} points, p {_p_text(self.p_value)}"
        if self.is_shown:
            return f"{second if self.difference > 0 else first} is better by {size}"
        return (
            f"no difference is shown ({size}); these {self.count:,} images would show one of about "
            f"{self.detectable:.2f} points with a probability of {100 * POWER:.0f} %"
        )


def paired_test(first: Sequence[bool], second: Sequence[bool]) -> PairedTest:
    """Return the paired test of two lists of hits, with one entry per image in the same order."""
    pairs = list(zip(first, second, strict=True))
    only_first = sum(one and not other for one, other in pairs)
    return PairedTest(len(pairs), only_first, sum(other and not one for one, other in pairs))


def _p_text(p_value: float) -> str:
    return "< 0.0001" if p_value < 0.0001 else f"= {p_value:.2g}"
