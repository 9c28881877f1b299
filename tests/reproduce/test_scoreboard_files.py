"""The page and the CSV file hold every number. tests/pages/ compares the committed files with the reports."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.reproduce.scoreboards import found, number, publish, rows, section
from zoo.benchmark.plot_style import Line, Panel
from zoo.reproduce.scoreboard_files import csv_text, read_rows, summary, write_forms

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_page_preserves_text_around_scoreboard(tmp_path: Path) -> None:
    assert write_forms(tmp_path) == ["README.md", "reproduction.csv"]
    page = tmp_path / "README.md"
    written = page.read_text()
    assert summary(read_rows(tmp_path)) in written
    heading, scoreboard = written.split("\n\n", 1)
    assert heading.startswith("# ")
    page.write_text(written.replace("\n<!-- /", "\nold\n<!-- /") + "\nBelow.\n")
    write_forms(tmp_path)
    assert page.read_text() == f"{written}\nBelow.\n"
    page.write_text("Above.\n")
    write_forms(tmp_path)
    assert page.read_text().rstrip() == f"Above.\n{scoreboard}".rstrip()


def test_item_with_plot_links_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plotted, other = number("table3/a"), number("table4/a", item="Table 4")
    publish(monkeypatch, plotted, other)
    drawn = section(found(plotted))
    drawn.panels.append(Panel("p", "x", "y", [Line("a", [1], [2.0])]))
    text = summary(list(rows(drawn, section(found(other), key="table4")).values()))
    assert "| [Table 3](revnet_table3.png) |" in text
    assert "| Table 4 " in text


@pytest.mark.parametrize(
    ("measured", "is_off", "better", "reproduced"),
    [
        ((100,), False, 0, 0),
        ((200,), True, 0, 0),
        ((100, 50), False, 1, 1),
        ((50, 40), False, 1, 0),
        ((200, 50), True, 0, 0),
    ],
)
def test_page_lists_what_is_off_and_counts_better_rows_as_reproduced(
    measured: tuple[int, ...], is_off: bool, better: int, reproduced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = number("table5/two", 100, unit="MB", evidence="memory predicted")
    publish(monkeypatch, published)
    text = summary(list(rows(section(*(found(published, each, spread=None) for each in measured))).values()))
    assert ("## What is off" in text) == is_off
    assert f"In {reproduced} of the {better} rows that are better, the other measurement reproduces" in text


def test_committed_files_have_line_for_each_number() -> None:
    """After a change of the published numbers, run zoo reproduce all, see docs/results/README.md."""
    committed = read_rows(RESULTS)
    assert [row.number.id for row in committed if row.section is None or not row.farthest.reason] == []
    lines = list(csv.DictReader(csv_text(committed).splitlines()))
    assert {line["id"] for line in lines} == {row.number.id for row in committed}
    assert ("93.3", "%") in {(line["published"], line["unit"]) for line in lines}
