"""Scores of runs that differ only in their seed, with mean and spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from zoo.tables import Cell, markdown_table


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


def spreads_of(runs: Mapping[int, Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of each score over at least one run, given the scores of each seed."""
    names = next(iter(runs.values()))
    return {name: spread_of([scores[name] for scores in runs.values()]) for name in names}


def seeds_table(labels: Mapping[str, str], runs: Mapping[int, Mapping[str, float]]) -> str:
    """Return a Markdown table with a row per seed, followed by mean and spread; ``labels``: the scores to show."""
    rows: list[list[Cell]] = [[f"seed {seed}", *map(scores.get, labels)] for seed, scores in runs.items()]
    spreads = spreads_of(runs)
    for title in ("mean", "standard deviation", "standard error"):
        rows.append([title, *(getattr(spreads[name], title.replace(" ", "_")) for name in labels)])
    return markdown_table(["", *(f"{label} %" for label in labels.values())], rows)
