"""The ledger's files hold every row, for programs, for readers of Markdown and for browsers."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.reproduce.ledgers import ENVIRONMENT, found, number, publish, rows_of
from zoo.errors import ConfigError
from zoo.reproduce.ledger import UNNAMED, Row
from zoo.reproduce.ledger_files import csv_text, read_rows, write_ledger
from zoo.reproduce.ledger_html import html_page
from zoo.reproduce.ledger_page import markdown_page
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import published_numbers

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CHROMIUM = Path("/usr/bin/chromium")
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
    write_ledger(tmp_path, rows, COMMAND, ENVIRONMENT)
    assert list(read_rows(tmp_path).values()) == rows
    content = json.loads((tmp_path / "reproduction.json").read_text())
    assert content["states"]["off"] == 1
    assert (content["command"], content["environment"]["commit"]) == (COMMAND, "a" * 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "REPRODUCTION.md", "reproduction.csv", "reproduction.html", "reproduction.json",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"rows": [{"id": "a"}]}'])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, text: str) -> None:
    assert read_rows(tmp_path) == {}
    (tmp_path / "reproduction.json").write_text(text)
    with pytest.raises(ConfigError, match=r"no rows of zoo reproduce; .*reproduction\.json"):
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
    page = markdown_page(rows, TITLES, COMMAND)
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
    page = markdown_page(rows, TITLES, COMMAND)
    assert "The rows are of 2 commits, and each names its own." in page
    assert f"2 rows of commit `{'a' * 40}`, 2026-03-04, 1 of them measured: torch 2.15.0" in page
    assert f"1 rows of commit `{'b' * 40}-dirty`, at an unknown time, 1 of them measured: torch 2.14.0" in page
    assert "1 rows that no command was run for" in page


def test_the_committed_page_has_every_published_number_and_says_why_of_each_that_is_not_measured() -> None:
    """After a change of the published numbers: zoo reproduce all, as docs/results/README.md has it."""
    rows = read_rows(RESULTS)
    published = {number.id: number for paper in PAPERS for number in published_numbers(paper).values()}
    assert list(rows) == list(published)
    assert [id for id, row in rows.items() if row.published != published[id].value] == []
    assert [id for id, row in rows.items() if row.verdict.endswith(UNNAMED) or not row.verdict or not row.command] == []
    assert [id for id, row in rows.items() if row.measured is None and row.state in ("reproduced", "off")] == []


class Page(HTMLParser):
    """The rows of a page of HTML, as (state, hidden), and all names of elements and addresses in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[tuple[str | None, bool]] = []
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value is not None]
        if tag == "details" and "data-state" in given:
            self.rows.append((given["data-state"], "hidden" in given))


def test_the_html_page_is_complete_in_itself_and_nothing_in_it_runs_that_is_not_its_own(rows: list[Row]) -> None:
    text = html_page(rows, TITLES, COMMAND)
    page = Page(text)
    assert page.rows == [("not run", False), ("off", False), ("needs training", False), ("reproduced", False)]
    assert page.elements.count("script") == 1
    assert "link" not in page.elements
    assert all(address.startswith("#") for address in page.addresses)
    assert "http" not in text.partition("<body>")[0]
    assert "&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt; | {{rows}}" in text
    for evidence in ("7.14% 7.24%", "Table 3, row 1", "torch 2.14.0", "zoo reproduce revnet --item", "b" * 40):
        assert evidence in text


@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium here")
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", ["not run", "off", "needs training", "reproduced"]),
        ("#paper=revnet&state=off", ["off"]),
        ("#state=needs+training", ["needs training"]),
        ("#kind=read%20off%20a%20figure", ["reproduced"]),
        ("#q=TABLE3/c%20row", ["needs training"]),
        ("#revnet/table3/a", ["not run", "off", "needs training", "reproduced"]),
    ],
)
def test_a_browser_shows_the_rows_that_the_address_asks_for(
    rows: list[Row], tmp_path: Path, address: str, shown: list[str]
) -> None:
    (tmp_path / "page.html").write_text(html_page(rows, TITLES, COMMAND))
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/page.html{address}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    page = Page(done.stdout)
    assert [state for state, is_hidden in page.rows if not is_hidden] == shown
    assert f"{len(shown)} of 4 numbers" in done.stdout
    opened = re.search(r'<details id="revnet/table3/a"[^>]* open=""', done.stdout)
    assert (opened is not None) == address.startswith("#revnet/")
