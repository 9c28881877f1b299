"""Mean and spread over seeds are those of the runs that did not fail."""

from __future__ import annotations

import json
import math

import pytest

from zoo.run.seeds import SeedRun, seeds_json, seeds_table, spread_of

LABELS = {"top1": "top-1", "top5": "top-5"}
RUNS = [
    SeedRun(1, "runs/a-seed1", {"top1": 70.0, "top5": 90.0}),
    SeedRun(2, "runs/a-seed2", None, "the loss was not finite"),
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
        ["seed 2, failed", "", ""],
        ["seed 3", "73.00", "90.00"],
        ["seed 4", "76.00", "90.00"],
        ["mean", "73.00", "90.00"],
        ["standard deviation", "3.00", "0.00"],
        ["standard error", "1.73", "0.00"],
    ]


def test_without_a_finished_run_there_is_no_summary() -> None:
    assert seeds_table(LABELS, RUNS[1:2]).splitlines()[-1].startswith("| seed 2, failed")
    assert seeds_json(RUNS[1:2])["summary"] == {}


def test_the_file_has_each_run_and_the_summary() -> None:
    content = json.loads(json.dumps(seeds_json(RUNS), allow_nan=False))
    assert content["runs"][1] == {
        "seed": 2, "log_dir": "runs/a-seed2", "scores": None, "fault": "the loss was not finite",
    }  # fmt: skip
    assert content["summary"]["top1"]["mean"] == 73.0
    assert content["summary"]["top5"] == {
        "mean": 90.0, "standard_deviation": 0.0, "standard_error": 0.0, "runs": 3,
    }  # fmt: skip
