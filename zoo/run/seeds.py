"""Scores of runs that differ only in their seed, with mean and spread.

Tested by tests/reproduce/test_comparison.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple


class Spread(NamedTuple):
    """Mean and spread of a score over ``runs`` runs.

    The sample standard deviation has n - 1 degrees of freedom; the standard error of the mean is the standard deviation
    divided by sqrt(n). Both are None for one run.
    """

    mean: float
    standard_deviation: float | None
    standard_error: float | None
    runs: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean and spread of the values of at least one run."""
    deviation = stdev(values) if len(values) > 1 else None
    error = None if deviation is None else deviation / math.sqrt(len(values))
    return Spread(mean(values), deviation, error, len(values))
