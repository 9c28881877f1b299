"""``zoo reproduce`` PAPER and ``all`` write reports and the scoreboard, and reject unusable input at once."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.runs import make_run
from tests.reproduce.scoreboards import number, publish
from zoo.benchmark.plot_style import Line, Panel
from zoo.cli import main
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


def reproduce(*words: object) -> int:
    return main(["reproduce", *map(str, words), "--no-plot"])


def test_report_and_plots_are_written_and_verdicts_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["reproduce", "revnet", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "revnet.json").read_text())
    assert content["command"] == f"zoo reproduce revnet --out {tmp_path}"
    assert content["sections"][0]["figures"][0]["measured"] == 2.1
    assert "revnet, Figure 1 (2 of 2)" in caplog.messages
    assert capsys.readouterr().out.splitlines() == [
        "| item            | number | published | measured | verdict            |",
        "| --------------- | ------ | --------- | -------- | ------------------ |",
        "| revnet, Table 9 | bytes  | 2 B       | 2.1 B    | reproduced: +5.0 % |",
        "",
        "Of 2 published numbers, 1 are measured: 1 reproduced, 0 better, 0 off, 0 underpowered.",
        "",
        *(
            f"written: {tmp_path / name}"
            for name in ("revnet.json", "revnet_table9.png", "README.md", "reproduction.csv")
        ),
    ]


@pytest.mark.parametrize(
    "words", [["revnet"], ["revnet", "--only", "Table 9"], ["all", "--only", "figure1"], ["revnext", "--runs", "run"]]
)
def test_only_written_files_are_printed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", [10.0, 20.0])
    assert reproduce(*words, "--out", "out") == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("written: ")]
    assert printed == list(dict.fromkeys(printed))
    assert {Path(line.removeprefix("written: ")) for line in printed} == set(Path("out").iterdir())


def test_table_holds_only_requested_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("all", "--out", tmp_path) == 0
    assert capsys.readouterr().out.count(" Table 9 ") == 3
    assert reproduce("revnet", "--only", "Figure 1", "--out", tmp_path) == 0
    assert capsys.readouterr().out.startswith("Of 2 published numbers, 1 are measured")


def test_all_measures_every_paper_and_counts_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("all", "--out", tmp_path) == 0
    lines = csv.DictReader((tmp_path / "reproduction.csv").read_text(encoding="utf-8").splitlines())
    assert [(row["state"], row["command"]) for row in lines if row["id"].startswith("revnext")] == [
        ("reproduced", "zoo reproduce revnext --only 'Table 9'"),
        ("not measured", "zoo reproduce revnext --only 'Figure 1'"),
    ]
    printed = capsys.readouterr().out
    assert "Of 6 published numbers, 3 are measured: 3 reproduced, 0 better, 0 off, 0 underpowered." in printed
    assert all((tmp_path / f"{paper}.json").exists() for paper in PAPERS)


def test_unknown_item_raises_with_available_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("revnet", "--only", "Table 1", "--out", tmp_path) == 2
    assert "--only: there is no measurement of Table 1; revnet has Table 9, Figure 1" in (capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_curves_of_runs_are_kept_and_drawn(tmp_path: Path, given: list[Any]) -> None:
    """The file of runs that replaces a log folder is read together with its report."""
    pytest.importorskip("matplotlib")
    folder, out = make_run(tmp_path / "run", [10.0, 20.0]), tmp_path / "out"
    assert main(["reproduce", "revnet", "--runs", str(folder), "--out", str(out)]) == 0
    assert json.loads((out / "revnet_runs.json").read_text())["runs"][0]["epochs"][1]["val_top1"] == 20.0
    assert (out / "revnet_runs.png").exists()
    assert reproduce("revnet", "--only", "figure1", "--out", out) == 0
    assert [[run.top1 for run in runs] for runs in given] == [[[10.0, 20.0]]] * 2


def test_existing_score_report_is_read(tmp_path: Path, given: list[Any]) -> None:
    keys = ("network", "protocol", "top1", "top5", "count", "standard_errors", "environment", "command")
    row = dict.fromkeys(keys, "a")
    (tmp_path / "imagenet.json").write_text(json.dumps({"benchmark": "imagenet", "rows": [row]}))
    assert reproduce("inplace_abn", "--out", tmp_path) == 0
    assert given == [[row]]
    (tmp_path / "imagenet.json").write_text(json.dumps({"benchmark": "other"}))
    assert reproduce("inplace_abn", "--out", tmp_path) == 2
