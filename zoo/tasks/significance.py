"""How far a score on a finite set of images can be trusted: its standard error, and an exact test of a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.05  # differences that chance alone would give less often than this are called differences
POWER = 0.8  # the probability with which a difference of the detectable size is found


def standard_error(percent: float, count: int) -> float:
    """Return the binomial standard error, in points, of a share of ``percent`` of ``count`` independent images.

    It is 0 for 0 and 100 percent, where it says nothing.
    """
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / count)


def mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's test in its exact form, from the images that only one of two has right.

    If both are equally good, each of these n images is as likely to be in one group as in the other. The p-value is the
    probability of groups at least as unequal, 2 * P(X <= smaller group) with X ~ Binomial(n, 1/2), and at most 1. The
    sum is one of whole numbers, and exact.
    """
    total, smaller = only_first + only_second, min(only_first, only_second)
    ways, term = 0, 1  # of choosing up to ``smaller`` of ``total`` images
    for chosen in range(smaller + 1):
        ways += term
        term = term * (total - chosen) // (chosen + 1)
    return min(1.0, 2 * ways / 2**total)


@dataclass(frozen=True)
class PairedTest:
    """Two sets of predictions for the same images, each right or wrong; differences are the second minus the first.

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
        """The difference between the two scores, in points."""
        return 100 * (self.only_second - self.only_first) / self.count

    @property
    def standard_error(self) -> float:
        """The standard error of the difference, in points; that of pairs is smaller than that of two separate sets."""
        variance = self.only_first + self.only_second - (self.only_second - self.only_first) ** 2 / self.count
        return 100 * math.sqrt(max(0.0, variance)) / self.count

    @property
    def p_value(self) -> float:
        """The probability of a difference at least as large by chance alone, see `mcnemar_p_value`."""
        return mcnemar_p_value(self.only_first, self.only_second)

    @property
    def is_shown(self) -> bool:
        """Whether the two differ by more than chance explains."""
        return self.p_value < LEVEL

    @property
    def detectable(self) -> float:
        """The difference, in points, that would be found with a probability of `POWER`.

        That is about 2.8 standard errors of a difference between two that disagree on as many images as these. It is at
        least the fewest images that can show a difference, when all of them are of one group (6 of 6).
        """
        deviations = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)
        fewest = next(number for number in range(1, 100) if mcnemar_p_value(0, number) < LEVEL)
        return 100 * max(fewest, deviations * math.sqrt(self.only_first + self.only_second)) / self.count

    def verdict(self, first: str, second: str) -> str:
        """Return what follows, in words; ``first`` and ``second`` are the names of the two."""
        size = f"{abs(self.difference):.2f} ± {self.standard_error:.2f} points, p {_shown(self.p_value)}"
        if self.is_shown:
            return f"{second if self.difference > 0 else first} is better by {size}"
        return (
            f"no difference is shown ({size}); these {self.count:,} images would show one of about "
            f"{self.detectable:.2f} points with a probability of {100 * POWER:.0f} %"
        )


def paired_test(first: Sequence[bool], second: Sequence[bool]) -> PairedTest:
    """Return the test of two sets of predictions, which say of each image, in one order, whether they are right."""
    pairs = list(zip(first, second, strict=True))
    only_first = sum(one and not other for one, other in pairs)
    return PairedTest(len(pairs), only_first, sum(other and not one for one, other in pairs))


def _shown(p_value: float) -> str:
    return "< 0.0001" if p_value < 0.0001 else f"= {p_value:.2g}"
