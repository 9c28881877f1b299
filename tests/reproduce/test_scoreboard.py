"""The scoreboard has a row for each published number, and keeps what was measured until it is measured again."""

from __future__ import annotations

import pytest

from tests.reproduce.scoreboards import found, measured_by, number, publish
from zoo.reproduce.comparison import Comparison, State, Verdict
from zoo.reproduce.scoreboard import (
    NOT_REPORTED,
    STATES,
    Row,
    Scoreboard,
    count_sentence,
    count_states,
    counts_in_words,
)

ONE, TWO = number("table3/one"), number("table3/two", 5.17)
PAPERS = ["inplace_abn", "revnet"]


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, ONE, TWO, number("table1/three", 78.08, "inplace_abn"))


def scoreboard_after(
    *comparisons: Comparison, kept: Scoreboard | None = None, is_part: bool = False, **by: str
) -> Scoreboard:
    """Return the scoreboard after a run that found these, with the rows of an earlier one."""
    scoreboard = Scoreboard(PAPERS, kept.rows if kept else {})
    for comparison in comparisons:
        scoreboard.add(comparison, measured_by(**by), is_part=is_part)
    return scoreboard


def test_every_published_number_has_a_row_in_the_order_of_the_papers() -> None:
    rows = Scoreboard(PAPERS, {}).rows
    assert list(rows) == ["inplace_abn/table1/three", "revnet/table3/one", "revnet/table3/two"]
    assert {row.state for row in rows.values()} == {"not run"}
    assert rows[ONE.id].verdict == "not run: `zoo reproduce revnet`"


def test_a_row_has_the_published_number_the_measured_one_and_how_it_was_measured() -> None:
    row = scoreboard_after(found(ONE, n=3, spread=0.1, weights_md5="md5", data="digest")).rows[ONE.id]
    assert (row.published, row.unit, row.kind, row.place, row.quotation) == (
        7.24, "%", "printed", "Table 3, row 1", "7.14% 7.24%",
    )  # fmt: skip
    assert (row.measured, row.measured_unit, row.n, row.spread, row.state, row.verdict) == (
        7.3, "%", 3, 0.1, "reproduced", "reproduced: as measured",
    )  # fmt: skip
    assert (row.commit, row.date, row.environment) == ("a" * 40, "2026-03-04", {"torch": "2.15.0", "cuda": None})
    assert (row.weights_md5, row.data, row.command) == ("md5", "digest", "zoo reproduce revnet --only 'Table 3'")


def test_the_first_comparison_that_names_a_number_is_its_row() -> None:
    assert scoreboard_after(found(ONE, 1.0), found(None), found(ONE, 2.0)).rows[ONE.id].measured == 1.0


def test_what_was_read_from_runs_has_their_commit_and_what_was_read_from_a_report_its_date_and_command() -> None:
    of_runs = found(ONE, environment={"commit": "b" * 40})
    of_report = found(
        TWO, environment={"commit": "c" * 40}, date="2025-01-01T00:00:00", command="zoo reproduce imagenet"
    )
    rows = scoreboard_after(of_runs, of_report).rows
    assert (rows[ONE.id].commit, rows[ONE.id].date) == ("b" * 40, "")
    two = rows[TWO.id]
    assert (two.commit, two.date, two.command) == ("c" * 40, "2025-01-01", "zoo reproduce imagenet")


def test_rows_that_a_later_run_does_not_name_stay_with_their_commit() -> None:
    first = scoreboard_after(found(ONE, 1.0), found(TWO, 2.0))
    later = scoreboard_after(found(TWO, 3.0), kept=first, commit="b" * 40)
    assert [(row.measured, row.commit) for row in later.rows.values()][1:] == [(1.0, "a" * 40), (3.0, "b" * 40)]


@pytest.mark.parametrize("state", ["needs data", "needs training"])
def test_what_was_measured_is_not_replaced_by_the_word_that_more_is_needed(state: State) -> None:
    first = scoreboard_after(found(ONE, 1.0), found(TWO, state=state))
    later = scoreboard_after(found(ONE, state=state), found(TWO, state=state), kept=first, commit="b" * 40)
    one, two = later.rows[ONE.id], later.rows[TWO.id]
    assert (one.measured, one.commit) == (1.0, "a" * 40)
    assert (two.measured, two.state, two.commit, two.n) == (None, state, "b" * 40, None)


def test_what_was_measured_on_images_is_not_replaced_by_what_was_measured_without() -> None:
    first = scoreboard_after(found(ONE, 1.0, data="digest"))
    assert scoreboard_after(found(ONE, 2.0), kept=first).rows[ONE.id].measured == 1.0
    assert scoreboard_after(found(ONE, 3.0, data="other"), kept=first).rows[ONE.id].measured == 3.0


def test_a_measurement_that_was_taken_away_takes_its_row_along() -> None:
    first = scoreboard_after(found(ONE, 1.0))
    assert scoreboard_after(found(ONE, state="not built"), kept=first).rows[ONE.id].measured is None
    later = Scoreboard(PAPERS, first.rows)
    later.complete("revnet", measured_by())
    assert {later.rows[each.id].verdict for each in (ONE, TWO)} == {f"not built: {NOT_REPORTED}"}
    assert later.rows["inplace_abn/table1/three"].state == "not run"


def test_a_part_of_a_paper_replaces_only_rows_of_the_items_that_it_measures() -> None:
    first = scoreboard_after(found(ONE, 1.0))
    later = scoreboard_after(found(ONE, 2.0), found(TWO, 3.0), kept=first, is_part=True, section="Figure 9")
    assert [later.rows[each.id].measured for each in (ONE, TWO)] == [1.0, 3.0]
    assert scoreboard_after(found(ONE, 2.0), kept=first, is_part=True).rows[ONE.id].measured == 2.0


def test_a_row_whose_published_number_has_changed_has_to_be_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first = scoreboard_after(found(ONE), found(TWO))
    publish(monkeypatch, number("table3/one", 7.14), number("table3/two", 5.17, place="Table 3, row 9"))
    later = Scoreboard(PAPERS, first.rows).rows
    one, two = later[ONE.id], later[TWO.id]
    assert (one.published, one.measured, one.state) == (7.14, None, "not run")
    assert one.verdict == "not run: the published number was 7.24 % when it was measured"
    assert (two.measured, two.place) == (7.3, "Table 3, row 9")


def test_numbers_are_counted_by_their_states() -> None:
    rows: list[Row] = list(scoreboard_after(found(ONE), found(TWO, state="off")).rows.values())
    assert count_states(rows) == {**dict.fromkeys(STATES, 0), "reproduced": 1, "off": 1, "not run": 1}
    assert count_sentence(rows) == "Of 3 published numbers: 1 reproduced, 1 off, 1 not run."
    assert counts_in_words({"off": 0, "needs data": 1, "needs training": 2}) == ["1 needs data", "2 need training"]


def test_numbers_that_the_papers_do_not_have_have_no_row() -> None:
    rows = scoreboard_after(Comparison("a", None, 1.0, "", Verdict("nothing published"))).rows
    assert {row.state for row in rows.values()} == {"not run"}
