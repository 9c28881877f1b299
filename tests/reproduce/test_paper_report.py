"""The report of a paper holds all comparisons, as text and as JSON, and its plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.reproduce.scoreboards import ENVIRONMENT, number
from zoo.engine.process import CPU
from zoo.reproduce.comparison import Section, Verdict, compare, not_measured
from zoo.reproduce.paper_report import SHOWN_KEYS, Report, redraw, write_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.training_runs import load_changed
from zoo.run.cost import CostMeter
from zoo.run.plot_style import Line, Panel, draw_panels


def test_all_experiments_of_the_tables_exist() -> None:
    for name in (name for paper in PAPERS.values() for name in paper.experiments):
        assert load_changed(name).network.num_classes in (10, 100, 1000)


def test_reports_hold_all_comparisons_as_text_and_json_with_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0]), Line("law", [1, 2], [3.0, 5.0], True)], True, True)
    near = compare("bytes", number("table3/one", 2, unit="B"), 2.0, "B", 0.1)
    section = Section("one", "Table 1", "Measured so.", [near], ["a note"], [panel])
    missing = not_measured("error", number("table3/two"), "%", Verdict("needs training", "`zoo train x`"))
    plain = Section("two", "Table 2", "Not measured.", [missing])
    environment = {**dict.fromkeys(SHOWN_KEYS, "1"), **ENVIRONMENT}
    report = Report(
        tmp_path, "revnet", "Title", "zoo reproduce revnet", environment, True, CostMeter(CPU), ["a remark"]
    )
    text = write_report(report, [section, plain])
    assert text == (tmp_path / "revnet.md").read_text()
    for part in ("- a remark", "| bytes", "within 10 %", "- a note", "(revnet_one.png)", "printed, Table 3, row 1"):
        assert part in text
    assert "needs training: `zoo train x`" in text
    content = json.loads((tmp_path / "revnet.json").read_text())
    first, second = (each["figures"][0] for each in content["sections"])
    assert first["published"] == {"id": "revnet/table3/one", "kind": "printed", "place": "Table 3, row 1", "value": 2}
    assert (first["state"], second["state"], second["measured"]) == ("reproduced", "needs training", None)
    assert content["sections"][0]["panels"][0]["lines"][0]["y"] == [3.0, 4.0]
    assert (tmp_path / "revnet_one.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "revnet_two.png").exists()
    drawn = (tmp_path / "revnet_one.png").read_bytes()
    (tmp_path / "revnet_one.png").unlink()
    redraw(tmp_path / "revnet.json")
    assert (tmp_path / "revnet_one.png").read_bytes() == drawn


def test_plots_have_room_for_many_panels() -> None:
    pytest.importorskip("matplotlib")
    panels = [Panel(str(n), "x", "y", [Line("a", [0, 1], [1.0, 2.0])]) for n in range(4)]
    assert draw_panels("A title that is long enough to be broken " * 3, panels).startswith(b"\x89PNG")
