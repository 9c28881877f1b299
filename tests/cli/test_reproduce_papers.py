"""``zoo reproduce`` PAPER and ``all`` write reports and the scoreboard, and reject unusable input at once."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.reproduce.runs import make_run
from tests.reproduce.scoreboards import number, publish
from zoo.benchmark.plot_style import Line, Panel
from zoo.reproduce import measurements
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.papers import PAPERS

pytestmark = pytest.mark.slow  # trains and scores

NUMBERS = {
    paper: [
        number(f"{item}/a", 2, paper, item=title, unit="B", evidence="memory measured")
        for item, title in (("table9", "Table 9"), ("figure1", "Figure 1"))
    ]
    for paper in PAPERS
}


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give each paper two items that take no time; return the argument of the second item."""
    publish(monkeypatch, *(number for numbers in NUMBERS.values() for number in numbers))
    monkeypatch.setattr(measurements, "_MEASUREMENTS", [])
    received: list[Any] = []
    for paper, (table, figure) in NUMBERS.items():

        def measure_table(table: Any = table) -> ReportSection:
            panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0])])
            bytes_ = Comparison("bytes", 2.1, table)
            return ReportSection("table9", "Table 9", [bytes_], panels=[panel])

        def measure_figure(inputs: Any, figure: Any = figure) -> ReportSection:
            received.append(inputs)
            needed = Comparison("bytes", None, figure, pending="`zoo train x DATA`")
            ran = Comparison("bytes", 3, figure, environment={"commit": "1"})
            return ReportSection("figure1", "Figure 1", [ran if inputs else needed])

        measurements.measures(paper, "Figure 1", given="scores" if paper == "inplace_abn" else "runs")(measure_figure)
        measurements.measures(paper, "Table 9")(measure_table)
    return received


def test_report_and_plots_are_written_and_verdicts_printed(
    cli: Cli, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    printed = cli("reproduce", "revnet", "--out", tmp_path).out
    content = json.loads((tmp_path / "revnet.json").read_text())
    assert content["command"] == f"zoo reproduce revnet --out {tmp_path}"
    assert content["sections"][0]["figures"][0]["measured"] == 2.1
    assert "revnet, Figure 1 (2 of 2)" in caplog.messages
    files = ("revnet.json", "revnet_table9.png", "README.md", "reproduction.csv")
    assert printed.splitlines() == [
        "| item            | number | published | measured | verdict            |",
        "| --------------- | ------ | --------- | -------- | ------------------ |",
        "| revnet, Table 9 | bytes  | 2 B       | 2.1 B    | reproduced: +5.0 % |",
        "",
        "Of 2 published numbers, 1 are measured: 1 reproduced, 0 better, 0 off, 0 underpowered.",
        "",
        *(f"written: {tmp_path / name}" for name in files),
    ]


@pytest.mark.parametrize(
    ("words", "num_rows"),
    [
        ("all", 3),
        ("revnet", 1),
        ("revnet --only figure1", 0),
        ("all --only Table9", 3),
        ("revnet --runs run", 2),
    ],
)
def test_table_and_files_are_of_requested_items(
    words: str, num_rows: int, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", [10.0, 20.0])
    printed = cli("reproduce", *words.split(), "--out", "out", "--no-plot")
    assert len(printed.rows[1:]) == num_rows
    written = [line for line in printed.out.splitlines() if line.startswith("written: ")]
    assert len(written) == len(set(written))
    assert {Path(line.removeprefix("written: ")) for line in written} == set(Path("out").iterdir())


def test_scoreboard_has_state_and_command_of_every_paper(cli: Cli, tmp_path: Path) -> None:
    printed = cli("reproduce", "all", "--out", tmp_path, "--no-plot").out
    assert "Of 6 published numbers, 3 are measured: 3 reproduced, 0 better, 0 off, 0 underpowered." in printed
    lines = csv.DictReader((tmp_path / "reproduction.csv").read_text(encoding="utf-8").splitlines())
    assert [(row["state"], row["command"]) for row in lines if row["id"].startswith("revnext")] == [
        ("reproduced", "zoo reproduce revnext --only 'Table 9'"),
        ("not measured", "zoo reproduce revnext --only 'Figure 1'"),
    ]
    assert all((tmp_path / f"{paper}.json").exists() for paper in PAPERS)


def test_curves_of_runs_are_kept_and_drawn(cli: Cli, tmp_path: Path, given: list[Any]) -> None:
    """The file of runs that replaces a log folder is read together with its report."""
    pytest.importorskip("matplotlib")
    folder, out = make_run(tmp_path / "run", [10.0, 20.0]), tmp_path / "out"
    cli("reproduce", "revnet", "--runs", folder, "--out", out)
    assert json.loads((out / "revnet_runs.json").read_text())["runs"][0]["epochs"][1]["val_top1"] == 20.0
    assert (out / "revnet_runs.png").exists()
    cli("reproduce", "revnet", "--only", "figure1", "--out", out, "--no-plot")
    assert [[run.top1 for run in runs] for runs in given] == [[[10.0, 20.0]]] * 2


def test_existing_score_report_is_read(cli: Cli, tmp_path: Path, given: list[Any]) -> None:
    keys = ("network", "protocol", "top1", "top5", "count", "standard_errors", "environment", "command")
    row = dict.fromkeys(keys, "a")
    (tmp_path / "imagenet.json").write_text(json.dumps({"benchmark": "imagenet", "rows": [row]}))
    cli("reproduce", "inplace_abn", "--out", tmp_path, "--no-plot")
    assert given == [[row]]
    (tmp_path / "imagenet.json").write_text(json.dumps({"benchmark": "other"}))
    cli("reproduce", "inplace_abn", "--out", tmp_path, "--no-plot", code=2)
