"""The scoreboard's files hold every row, for programs and for readers."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from tests.reproduce.scoreboards import ENVIRONMENT, found, number, publish, rows_of
from zoo.errors import ConfigError
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import published_numbers
from zoo.reproduce.scoreboard import NOT_REPORTED, Row
from zoo.reproduce.scoreboard_files import csv_text, read_rows, write_scoreboard
from zoo.reproduce.scoreboard_page import scoreboard_page

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TITLES = {"inplace_abn": "The first paper", "revnet": "The second paper"}
COMMAND = "zoo reproduce all"
HOSTILE = """<script>alert("&")</script> | {{rows}}"""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Rows of two papers: one not run, one off, one read off a figure and hostile, one that needs training."""
    hostile = number(
        "figure2/b", "rises", item="Figure 2", kind="read off a figure", quotation=HOSTILE, quantity=HOSTILE
    )
    numbers = [number("table1/a", 78.08, "inplace_abn"), number("table3/a"), hostile, number("table3/c")]
    publish(monkeypatch, *numbers)
    of_runs = {"commit": f"{'b' * 40}-dirty", "torch": "2.14.0", "libjpeg": "6.2"}
    return rows_of(
        found(numbers[1], 9.5, "off", n=3, spread=0.25),
        found(hostile, "rises", environment=of_runs),
        found(numbers[3], state="needs training"),
    )


def test_rows_are_read_again_as_they_were_written(rows: list[Row], tmp_path: Path) -> None:
    write_scoreboard(tmp_path, rows, COMMAND, ENVIRONMENT)
    assert list(read_rows(tmp_path).values()) == rows
    content = json.loads((tmp_path / "reproduction.json").read_text())
    assert content["states"]["off"] == 1
    assert (content["command"], content["environment"]["commit"]) == (COMMAND, "a" * 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "REPRODUCTION.md", "reproduction.csv", "reproduction.json",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"rows": [{"id": "a"}]}'])
def test_a_file_that_is_no_scoreboard_is_refused(tmp_path: Path, text: str) -> None:
    assert read_rows(tmp_path) == {}
    (tmp_path / "reproduction.json").write_text(text)
    with pytest.raises(ConfigError, match=r"not written by zoo reproduce; .*reproduction\.json"):
        read_rows(tmp_path)


def test_the_csv_file_has_a_line_for_each_row_and_a_column_for_all_that_is_known(rows: list[Row]) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert {"paper", "item", "quantity", "published", "unit", "kind", "measured", "n", "spread", "verdict", "command",
            "commit", "date", "torch", "libjpeg"} <= lines[0].keys()  # fmt: skip
    assert [line["published"] for line in lines] == ["78.08", "7.24", "rises", "7.24"]
    assert [line["measured"] for line in lines] == ["", "9.5", "rises", ""]
    assert lines[2]["quotation"] == HOSTILE
    assert (lines[1]["torch"], lines[2]["torch"], lines[2]["libjpeg"]) == ("2.15.0", "2.14.0", "6.2")


def test_the_markdown_page_counts_the_states_and_shows_each_row_below_its_item(rows: list[Row]) -> None:
    page = scoreboard_page(rows, TITLES, COMMAND)
    assert "Of 4 published numbers: 1 reproduced, 1 off, 1 needs training, 1 not run." in page
    assert re.findall(r"^## (.+)|^### (.+)", page, re.MULTILINE)[1:] == [
        ("The first paper", ""), ("", "Table 3"), ("The second paper", ""), ("", "Table 3"), ("", "Figure 2"),
    ]  # fmt: skip
    (line,) = re.findall(r"^\| error of table3/a .*", page, re.MULTILINE)
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        "7.24 %", "printed", "9.5 %", "3", "0.25", "off: as measured", "[1]", "a" * 10, "2026-03-04",
    ]  # fmt: skip
    assert f"{'b' * 10}-dirty" in page


def test_the_page_says_on_top_of_which_commits_and_versions_its_rows_are(rows: list[Row]) -> None:
    page = scoreboard_page(rows, TITLES, COMMAND)
    assert "The rows were measured on 2 commits; each row names its own." in page
    assert f"2 rows of commit `{'a' * 40}`, 2026-03-04, 1 of them measured: torch 2.15.0" in page
    assert f"1 rows of commit `{'b' * 40}-dirty`, at an unknown time, 1 of them measured: torch 2.14.0" in page
    assert "1 rows without a run" in page


def test_the_committed_page_has_every_published_number_and_says_why_of_each_that_is_not_measured() -> None:
    """After a change of the published numbers: zoo reproduce all, as docs/results/README.md has it."""
    rows = read_rows(RESULTS)
    published = {number.id: number for paper in PAPERS for number in published_numbers(paper).values()}
    assert list(rows) == list(published)
    assert [id for id, row in rows.items() if row.published != published[id].value] == []
    assert [
        id for id, row in rows.items() if row.verdict.endswith(NOT_REPORTED) or not row.verdict or not row.command
    ] == []
    assert [id for id, row in rows.items() if row.measured is None and row.state in ("reproduced", "off")] == []
