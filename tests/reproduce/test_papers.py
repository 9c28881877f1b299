"""The numbers of `zoo reproduce` PAPER are measured as they say and compared with published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo.config import experiments_dir
from zoo.errors import ConfigError
from zoo.reproduce import error_rates
from zoo.reproduce.comparison import (
    Line,
    Panel,
    PublishedValue,
    Section,
    compare,
    compare_decades,
    compare_minimum,
    compare_trend,
    compare_with_axis,
    not_run,
)
from zoo.reproduce.paper_report import PaperOptions, of_table, write_report
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.plot import draw, draw_report


def verdicts(section: Section) -> dict[str, str]:
    return {comparison.what: comparison.verdict for comparison in section.comparisons}


def printed(value: float) -> PublishedValue:
    return PublishedValue(value, "printed", "Table 1")


def test_verdicts_say_how_far_a_number_is_from_the_published_one() -> None:
    assert compare("a", printed(100), 101.0, "", 0.02).verdict == "within 2 %"
    assert compare("a", printed(100), 95.0, "", 0.02).verdict == "off by -5.0 %"
    assert compare_minimum("a", printed(3.6), 3.6, "").verdict == "reached"
    assert compare_minimum("a", printed(3.6), 1.8, "").verdict == "off by -50.0 %"
    assert compare_with_axis("a", printed(10), 9.0, "").verdict == "within the axis"
    assert compare_with_axis("a", printed(10), 11.0, "").verdict == "off: above the axis"
    assert not_run("a", printed(1), "", "zoo train x").verdict == "not run: `zoo train x`"


def test_a_trend_has_the_verdict_of_what_was_measured() -> None:
    rises = PublishedValue("rises", "printed", "section 1")
    assert compare_trend("a", rises, [1.0, 3.0, 2.0], "").verdict == "rises"
    assert compare_trend("a", rises, [1.0, 3.0, 0.5], "").verdict == "falls, not as published"


def test_values_that_span_decades_are_compared_by_their_factor() -> None:
    one, two = printed(1e9), printed(1e2)
    assert compare_decades("a", [one], [1.9e9]).verdict == "within a factor of 2"
    assert compare_decades("a", [one], [4e8]).verdict == "lower"
    assert compare_decades("a", [one, two], [3e9, 300.0]).verdict == "higher"
    both = compare_decades("a", [one, two], [3e9, 100.0])
    assert both.verdict == "first higher, last within a factor of 2"
    assert both.published == PublishedValue("1e+09 to 1e+02", "printed", "Table 1")


@pytest.mark.parametrize(("paper", "counts"), [("inplace_abn", {2: 1}), ("revnext", {1: 2, 2: 1}), ("revnet", {3: 1})])
def test_one_table_of_a_paper_can_be_chosen(paper: str, counts: dict[int, int]) -> None:
    measurements = PAPERS[paper].measurements([], None)
    assert {number: len(of_table(number, measurements)) for number in counts} == counts
    with pytest.raises(ConfigError, match=r"--table 9: .* but of Table \d"):
        of_table(9, measurements)


def test_all_experiments_of_the_tables_exist() -> None:
    names = [name for paper in PAPERS.values() for name in paper.experiments]
    assert [name for name in names if not (experiments_dir() / f"{name.partition(' ')[0]}.json").exists()] == []
    assert error_rates.command_of(names[0]).startswith(f"zoo train {names[0]} ")


def test_reports_hold_all_comparisons_as_text_and_json_with_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = Panel("p", "x", "y", [Line("a", [1, 2], [3.0, 4.0]), Line("law", [1, 2], [3.0, 5.0], True)], True, True)
    section = Section(
        "one", "Table 1", "Measured so.", [compare("bytes", printed(2), 2.0, "B", 0.1)], ["a note"], [panel]
    )
    missing = not_run("error", PublishedValue(7.24, "printed", "Table 3"), "%", "zoo train x")
    plain = Section("two", "Table 2", "Not measured.", [missing])
    text = write_report(PaperOptions("revnet", out=tmp_path), "Title", [section, plain], ["a remark"])
    assert text == (tmp_path / "revnet.md").read_text()
    for part in ("- a remark", "| bytes", "within 10 %", "- a note", "(revnet_one.png)", "printed, Table 3"):
        assert part in text
    assert "not run: `zoo train x`" in text
    content = json.loads((tmp_path / "revnet.json").read_text())
    assert content["sections"][0]["panels"][0]["lines"][0]["y"] == [3.0, 4.0]
    assert (tmp_path / "revnet_one.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "revnet_two.png").exists()
    drawn = (tmp_path / "revnet_one.png").read_bytes()
    (tmp_path / "revnet_one.png").unlink()
    draw_report(tmp_path / "revnet.json")
    assert (tmp_path / "revnet_one.png").read_bytes() == drawn


def test_plots_have_room_for_many_panels() -> None:
    pytest.importorskip("matplotlib")
    panels = [Panel(str(n), "x", "y", [Line("a", [0, 1], [1.0, 2.0])]) for n in range(4)]
    assert draw(Section("k", "A title that is long enough to be broken " * 3, "", panels=panels)).startswith(b"\x89PNG")
