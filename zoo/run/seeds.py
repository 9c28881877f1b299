"""Runs that differ in their seed alone: their scores, and the mean and the spread of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from zoo.tables import Cell, markdown_table


@dataclass(frozen=True)
class SeedRun:
    """The run of one seed.

    Args:
    - `seed`: its seed.
    - `log_dir`: its log folder.
    - `scores`: the scores of its last validation by name, percent; None for a run that failed.
    - `fault`: why it failed.
    """

    seed: int
    log_dir: str
    scores: Mapping[str, float] | None
    fault: str | None = None


@dataclass(frozen=True)
class Spread:
    """How far the values of several runs scatter.

    Args:
    - `mean`: their mean.
    - `standard_deviation`: that of one run, estimated from n - 1 degrees of freedom; None for one run.
    - `standard_error`: that of the mean, the standard deviation divided by sqrt(n); None for one run.
    - `runs`: n, the number of runs.
    """

    mean: float
    standard_deviation: float | None
    standard_error: float | None
    runs: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean and spread of the values of one run or more."""
    deviation = stdev(values) if len(values) > 1 else None
    error = None if deviation is None else deviation / math.sqrt(len(values))
    return Spread(mean(values), deviation, error, len(values))


def spreads_of(runs: Sequence[SeedRun]) -> dict[str, Spread]:
    """Return the spread of each score over the runs that did not fail; none if all failed."""
    scores = [run.scores for run in runs if run.scores is not None]
    return {name: spread_of([each[name] for each in scores]) for name in (scores[0] if scores else ())}


def seeds_table(labels: Mapping[str, str], runs: Sequence[SeedRun]) -> str:
    """Return a Markdown table with a row per seed, and below them mean and spread; ``labels`` are those of the task."""
    rows: list[list[Cell]] = []
    for run in runs:
        scores: list[Cell] = [None] * len(labels) if run.scores is None else [run.scores[name] for name in labels]
        rows.append([f"seed {run.seed}{', failed' * (run.scores is None)}", *scores])
    spreads = spreads_of(runs)
    for title in ("mean", "standard deviation", "standard error") if spreads else ():
        rows.append([title, *(getattr(spreads[name], title.replace(" ", "_")) for name in labels)])
    return markdown_table(["", *(f"{label} %" for label in labels.values())], rows)


def seeds_json(runs: Sequence[SeedRun]) -> dict[str, Any]:
    """Return what a result file has of the runs: each of them, and the spread of each score."""
    return {
        "runs": [asdict(run) for run in runs],
        "summary": {name: asdict(spread) for name, spread in spreads_of(runs).items()},
    }
