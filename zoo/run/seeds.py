"""Scores of runs that differ only in their seed, with mean and spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from zoo.tables import Cell, markdown_table


@dataclass(frozen=True)
class SeedRun:
    """Run with one seed.

    Args:
    - `seed`: the seed.
    - `log_dir`: the log folder.
    - `scores`: scores of the last validation by name, percent; None for a failed run.
    - `fault`: reason for the failure.
    """

    seed: int
    log_dir: str
    scores: Mapping[str, float] | None
    fault: str | None = None


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
    """Return the spread of each score over the successful runs; empty if all failed."""
    scores = [run.scores for run in runs if run.scores is not None]
    return {name: spread_of([each[name] for each in scores]) for name in (scores[0] if scores else ())}


def seeds_table(labels: Mapping[str, str], runs: Sequence[SeedRun]) -> str:
    """Return a Markdown table with a row per seed, followed by mean and spread; ``labels``: the scores to show."""
    rows: list[list[Cell]] = []
    for run in runs:
        scores: list[Cell] = [None] * len(labels) if run.scores is None else [run.scores[name] for name in labels]
        rows.append([f"seed {run.seed}{', failed' * (run.scores is None)}", *scores])
    spreads = spreads_of(runs)
    for title in ("mean", "standard deviation", "standard error") if spreads else ():
        rows.append([title, *(getattr(spreads[name], title.replace(" ", "_")) for name in labels)])
    return markdown_table(["", *(f"{label} %" for label in labels.values())], rows)


def seeds_json(runs: Sequence[SeedRun]) -> dict[str, Any]:
    """Return the runs and the spread of each score, for a result file."""
    return {
        "runs": [asdict(run) for run in runs],
        "summary": {name: asdict(spread) for name, spread in spreads_of(runs).items()},
    }
