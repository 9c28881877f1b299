"""The scoreboard's files hold every row, for programs and for readers."""

from __future__ import annotations

import csv
import io
import re
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.reproduce.scoreboards import found, number, publish, rows, section, waiting
from zoo.reproduce.scoreboard import Row
from zoo.reproduce.scoreboard_files import csv_text, forms_of, html_page, read_rows, summary

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HOSTILE = """<script>alert("&")</script> | `a` {{rows}}"""


@pytest.fixture
def all_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Rows of two papers: one without a report, one off and reproduced, one hostile, one that needs training."""
    hostile = number(
        "figure2/b", "rises", item="Figure 2", evidence="count", quotation=HOSTILE, quantity=HOSTILE, finding=HOSTILE
    )
    zeros = number("table1/a", Decimal("93.50"), "inplace_abn", network="resnet50")
    numbers = [
        zeros,
        number("table3/a"),
        hostile,
        number("table3/c"),
    ]
    publish(monkeypatch, *numbers)
    of_runs = {"commit": "b" * 40, "torch": "2.14.0", "libjpeg": "6.2"}
    compared = [
        found(numbers[1], 9.5, n=3),
        found(numbers[1]),
        found(hostile, "rises", environment=of_runs),
        waiting(numbers[3]),
    ]
    return list(rows(section(*compared)).values())


def test_the_csv_file_has_a_line_for_each_measurement(all_rows: list[Row]) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(all_rows))))
    assert {"paper", "item", "quantity", "published", "unit", "kind", "evidence", "what", "measured", "state",
            "reason", "spread_of", "command", "commit", "date", "torch"} <= lines[0].keys()  # fmt: skip
    assert [line["published"] for line in lines] == ["93.50", "7.24", "7.24", "rises", "7.24"], "zeros as printed"
    assert [line["measured"] for line in lines] == ["", "9.5", "7.3", "rises", ""]
    assert [line["state"] for line in lines[:3]] == ["not measured", "off", "reproduced"]
    assert lines[3]["quotation"] == HOSTILE
    assert (lines[1]["torch"], lines[3]["torch"], lines[3]["libjpeg"]) == ("2.15.0", "2.14.0", "6.2")


def test_the_summary_counts_by_evidence_and_has_a_line_per_item(all_rows: list[Row]) -> None:
    page = summary(all_rows)
    assert re.search(r"^\| accuracy trained +\| +3 \|", page, re.MULTILINE)
    assert "| [Figure 2](reproduction.html#revnet-figure2-b) |" in page
    assert f"1 rows, 2026-03-04, commit `{'a' * 40}`: torch 2.15.0" in page


class Page(HTMLParser):
    """Collects the rows of a page with their attributes, its scripts and its links, and checks that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.scripts = 0
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.rows += [found] if tag == "tr" and "data-state" in found else []
        self.links += [link] if (link := found.get("href") or found.get("src")) else []
        self.scripts += tag == "script"
        self.open += [] if tag in ("meta", "input", "img") else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_page_has_each_row_with_what_its_filters_need_and_runs_nothing_foreign(all_rows: list[Row]) -> None:
    page = Page(html_page(all_rows))
    states = {row["id"]: row["data-state"] for row in page.rows}
    assert states == {
        "inplace_abn-table1-a": "not measured", "revnet-table3-a": "off", "revnet-figure2-b": "reproduced",
        "revnet-table3-c": "not measured",
    }  # fmt: skip
    assert {row["data-evidence"] for row in page.rows} == {"accuracy trained", "count"}
    assert (page.scripts, page.open) == (1, [])


def test_the_committed_page_has_a_row_for_each_number_and_its_links_lead_somewhere() -> None:
    committed = read_rows(RESULTS)
    text = html_page(committed)
    assert "<td>O(L)\n" in text
    assert "<td>93.3 %\n" in text
    page = Page(text)
    anchors = {row["id"] for row in page.rows}
    assert len(anchors) == len(committed) == len(page.rows)
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in anchors
        elif "://" not in link:
            assert (RESULTS / link).exists(), link


def test_every_row_of_the_committed_page_has_its_measurement_or_the_reason_for_none() -> None:
    """After a change of the published numbers: zoo reproduce all, as docs/results/README.md has it."""
    committed = read_rows(RESULTS)
    assert [row.number.id for row in committed if row.section is None] == []
    assert [row.number.id for row in committed if not row.worst.reason] == []
    assert set(forms_of(committed)) <= {path.name for path in RESULTS.iterdir()}
