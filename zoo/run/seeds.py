"""Scores of runs that differ only in their seed, with mean and spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from zoo.tables import Cell, markdown_table


@dataclass(frozen=True)
class SeedRun:
    """Run with one seed.

    Args:
    - `seed`: the seed.
    - `log_dir`: the log folder.
    - `scores`: scores of the last validation by name, percent.
    """

    seed: int
    log_dir: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a score over several runs.

    Args:
    - `mean`: the mean.
    - `standard_deviation`: sample standard deviation, with n - 1 degrees of freedom; None for one run.
    - `standard_error`: standard error of the mean, the standard deviation divided by sqrt(n); None for one run.
    - `runs`: n, the number of runs.
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


def spreads_of(runs: Sequence[SeedRun]) -> dict[str, Spread]:
    """Return the spread of each score over at least one run."""
    return {name: spread_of([run.scores[name] for run in runs]) for name in runs[0].scores}


def seeds_table(labels: Mapping[str, str], runs: Sequence[SeedRun]) -> str:
    """Return a Markdown table with a row per seed, followed by mean and spread; ``labels``: the scores to show."""
    rows: list[list[Cell]] = []
    rows += [[f"seed {run.seed}", *(run.scores[name] for name in labels)] for run in runs]
    spreads = spreads_of(runs)
    for title in ("mean", "standard deviation", "standard error"):
        rows.append([title, *(getattr(spreads[name], title.replace(" ", "_")) for name in labels)])
    return markdown_table(["", *(f"{label} %" for label in labels.values())], rows)
