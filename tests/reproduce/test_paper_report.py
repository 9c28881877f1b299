"""The report of a paper holds all comparisons, as text and as JSON, and its plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.refusals import refused
from tests.reproduce.scoreboards import ENVIRONMENT, found, number, publish, section
from zoo.benchmark.plot_style import Line, Panel
from zoo.errors import ConfigError
from zoo.reproduce import paper_report
from zoo.reproduce.comparison import Comparison, ReportSection
from zoo.reproduce.paper_report import read_report, write_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.training_runs import load_changed


def test_all_experiments_of_tables_exist() -> None:
    for name in (name for paper in PAPERS.values() for name in paper.experiments):
        assert load_changed(name).network.num_classes in (10, 100, 1000)


def test_reports_hold_all_comparisons_and_have_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0]), Line("law", [1, 2], [3.0, 5.0], True)], True, True)
    one, two = number("table3/one", 2, unit="B", evidence="memory measured"), number("table3/two")
    publish(monkeypatch, one, two)
    near = Comparison("bytes", 2.1, one)
    first = ReportSection("one", "Table 1", [near], [panel], environment=ENVIRONMENT)
    missing = Comparison("error", None, two, pending="`zoo train x`")
    plain = ReportSection("two", "Table 2", [missing], environment=ENVIRONMENT)
    header = {"benchmark": "revnet", "command": "zoo reproduce", "environment": ENVIRONMENT}
    titles: list[str] = []
    draw = paper_report.draw_panels
    monkeypatch.setattr(
        paper_report, "draw_panels", lambda title, panels: [titles.append(title), draw(title, panels)][1]
    )
    write_report(tmp_path, header, [first, plain], with_plots=True)
    assert titles == [f"Table 1\n{PAPERS['revnet'].title}"]
    assert read_report(tmp_path, "revnet") == [first, plain]
    content = json.loads((tmp_path / "revnet.json").read_text())
    bytes_, error = (each["figures"][0] for each in content["sections"])
    assert (bytes_["published"], bytes_["value"], bytes_["measured"]) == (one.id, "2", 2.1)
    assert "verdict" not in bytes_, "it is computed"
    assert (error["pending"], error["measured"]) == ("`zoo train x`", None)
    assert (tmp_path / "revnet_one.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "revnet_two.png").exists()


ONE, TWO = number("table3/one"), number("table3/two", 5.17)


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"sections": [{"key": "a"}]}'])
def test_non_report_file_raises(tmp_path: Path, text: str) -> None:
    assert read_report(tmp_path, "revnet") == []
    (tmp_path / "revnet.json").write_text(text)
    refused(ConfigError, lambda: read_report(tmp_path, "revnet"), "revnet.json", "zoo reproduce")


def test_unpublished_number_has_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, ONE, TWO)
    header = {"benchmark": "revnet", "command": "", "environment": ENVIRONMENT}
    write_report(tmp_path, header, [section(found(ONE), found(TWO))], with_plots=False)
    publish(monkeypatch, TWO)
    (left,) = read_report(tmp_path, "revnet")[0].comparisons
    assert left.published == TWO
