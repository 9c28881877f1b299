"""``zoo reproduce revnet`` and ``revnext`` write one report each, and refuse what they cannot use before measuring."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reproduce.runs import make_run
from zoo.cli import build_parser, main
from zoo.reproduce.comparison import Line, Panel, PublishedValue, Section, compare
from zoo.reproduce.papers import PAPERS, Measurement


def _section() -> Section:
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0])])
    comparison = compare("bytes", PublishedValue(2, "printed", "Table 9"), 2.1, "B", 0.1)
    return Section("table9", "Table 9", "Measured.", [comparison], panels=[panel])


@pytest.fixture(params=["revnet", "revnext"])
def benchmark_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the benchmarks have one section that takes no time."""
    for name, paper in PAPERS.items():
        monkeypatch.setitem(PAPERS, name, replace(paper, measurements=lambda *_: [Measurement("Table 9", _section)]))
    return str(request.param)


def test_every_paper_can_be_named() -> None:
    assert [build_parser().parse_args(["reproduce", name]).benchmark for name in PAPERS] == list(PAPERS)


def test_report_and_plots_are_written(benchmark_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["reproduce", benchmark_name, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / f"{benchmark_name}.json").read_text())
    assert content["command"] == f"zoo reproduce {benchmark_name} --out {tmp_path}"
    assert content["sections"][0]["figures"][0]["verdict"] == "within 10 %"
    assert (tmp_path / f"{benchmark_name}.md").read_text() in capsys.readouterr().out
    assert (tmp_path / f"{benchmark_name}_table9.png").exists()


@pytest.mark.parametrize("benchmark_name", ["revnet"], indirect=True)
def test_the_curves_of_runs_are_kept_and_drawn(benchmark_name: str, tmp_path: Path) -> None:
    """The file that a log folder becomes is enough for the next report, which leaves it as it is."""
    pytest.importorskip("matplotlib")
    folder, out = make_run(tmp_path / "run", [10.0, 20.0]), tmp_path / "out"
    assert main(["reproduce", benchmark_name, "--runs", str(folder), "--out", str(out)]) == 0
    kept = (out / "revnet_runs.json").read_bytes()
    assert json.loads(kept)["runs"][0]["epochs"][1]["val_top1"] == 20.0
    (out / "revnet_runs.png").unlink()
    assert main(["reproduce", benchmark_name, "--runs", str(out / "revnet_runs.json"), "--out", str(out)]) == 0
    assert (out / "revnet_runs.json").read_bytes() == kept
    assert (out / "revnet_runs.png").exists()


def test_no_matplotlib_is_noticed_before_anything_is_measured(
    benchmark_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["reproduce", benchmark_name, "--out", str(tmp_path)]) == 2
    assert "extra `plot`" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["reproduce", benchmark_name, "--out", str(tmp_path), "--no-picture"]) == 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


def test_a_folder_that_is_no_run_is_refused_before_anything_is_measured(
    benchmark_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", benchmark_name, "--no-picture", "--runs", str(tmp_path)]) == 2
    assert str(tmp_path / "metrics.jsonl") in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")

    def measure() -> Section:
        raise AssertionError("measured")

    monkeypatch.setitem(PAPERS, "revnet", replace(PAPERS["revnet"], measurements=lambda *_: [measure]))
    assert main(["reproduce", "revnet", "--no-picture", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["revnet", "--models", "a"], "--models"),
        (["revnet", "--batch-size", "4"], "--batch-size"),
        (["revnext", "--data", "here"], "--data"),
        (["revnext", "-j", "99"], "--workers"),
        (["imagenet", "--data", "here", "--no-picture"], "--no-picture"),
        (["imagenet", "--data", "here", "--runs", "there"], "--runs"),
        (["imagenet"], "--data"),
    ],
)
def test_options_of_other_benchmarks_are_refused_by_name(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["reproduce", *command])
    assert error.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]


def test_a_report_of_a_changed_checkout_is_warned_of(
    benchmark_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.report.environment.checkout_commit", lambda: "1234-dirty")
    assert main(["reproduce", benchmark_name, "--no-picture", "--out", str(tmp_path)]) == 0
    assert "commit 1234-dirty, which nobody can check out" in capsys.readouterr().err
