"""Mean and spread over seeds."""

from __future__ import annotations

import math

import pytest

from zoo.run.seeds import SeedRun, seeds_table, spread_of

LABELS = {"top1": "top-1", "top5": "top-5"}
RUNS = [
    SeedRun(1, "runs/a-seed1", {"top1": 70.0, "top5": 90.0}),
    SeedRun(3, "runs/a-seed3", {"top1": 73.0, "top5": 90.0}),
    SeedRun(4, "runs/a-seed4", {"top1": 76.0, "top5": 90.0}),
]


def test_the_spread_is_that_of_a_sample() -> None:
    spread = spread_of([70.0, 73.0, 76.0])
    assert (spread.mean, spread.standard_deviation, spread.runs) == (73.0, pytest.approx(3.0), 3)
    assert spread.standard_error == pytest.approx(3.0 / math.sqrt(3))


def test_one_run_has_a_mean_and_no_spread() -> None:
    spread = spread_of([70.0])
    assert (spread.mean, spread.standard_deviation, spread.standard_error, spread.runs) == (70.0, None, None, 1)


def test_the_table_has_a_row_per_seed_and_the_summary_of_those_that_finished() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in seeds_table(LABELS, RUNS).splitlines()]
    assert rows[0] == ["", "top-1 %", "top-5 %"]
    assert rows[2:] == [
        ["seed 1", "70.00", "90.00"],
        ["seed 3", "73.00", "90.00"],
        ["seed 4", "76.00", "90.00"],
        ["mean", "73.00", "90.00"],
        ["standard deviation", "3.00", "0.00"],
        ["standard error", "1.73", "0.00"],
    ]
