"""The page of the scoreboard holds every row. tests/pages/test_provenance.py compares the committed files with it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.reproduce.scoreboards import found, number, publish, rows, section
from zoo.reproduce.scoreboard_files import html_page, read_rows

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HOSTILE = """<script>alert("&")</script> | `a` {{rows}}"""


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


def test_the_html_page_serves_its_filters_and_runs_no_external_code(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = number("table3/a", quotation=HOSTILE, quantity=HOSTILE, finding=HOSTILE)
    publish(monkeypatch, hostile)
    page = Page(html_page(list(rows(section(found(hostile, 9.5), found(hostile))).values())))
    (row,) = page.rows
    assert (row["id"], row["data-state"], row["data-evidence"]) == ("revnet-table3-a", "off", "accuracy trained")
    assert (page.scripts, page.open) == (1, [])


def test_the_committed_page_has_a_row_for_each_number_and_valid_links() -> None:
    """After a change of the published numbers: zoo reproduce all, as docs/results/README.md has it."""
    committed = read_rows(RESULTS)
    assert [row.number.id for row in committed if row.section is None or not row.worst.reason] == []
    text = html_page(committed)
    assert "<td>93.3 %\n" in text
    page = Page(text)
    anchors = {row["id"] for row in page.rows}
    assert len(anchors) == len(committed) == len(page.rows)
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in anchors
        elif "://" not in link:
            assert (RESULTS / link).exists(), link
