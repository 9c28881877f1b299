"""Text and progress bars share the terminal; where there is none, lines take the bar's place."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from zoo.run import console
from zoo.run.console import Progress, format_duration, set_up_console


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def _open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest sets stderr itself between the fixtures and the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_rank_0_prints_notices_and_the_others_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        set_up_console(rank)
        logging.getLogger("zoo.data").info("notice")
        logging.getLogger("zoo.data").warning("warning")
    assert capsys.readouterr().err.splitlines() == ["notice", "warning", "rank 1: warning"]


def test_a_second_set_up_does_not_print_everything_twice(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_console(0)
    set_up_console(0)
    logging.getLogger("zoo").info("once")
    assert capsys.readouterr().err == "once\n"


def test_lines_that_repeat_the_bar_are_printed_only_where_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_console(0)
    with monkeypatch.context() as patch:
        terminal = _open_terminal(patch)
        logging.getLogger("zoo").info("loss 1", extra={"shown_by_bar": True})
        assert terminal.getvalue() == ""
    logging.getLogger("zoo").info("loss 2", extra={"shown_by_bar": True})
    assert capsys.readouterr().err == "loss 2\n"


def test_lines_for_log_files_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_console(0)
    logging.getLogger("zoo").info("stopped", extra={"only_in_files": True})
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_with_the_told_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _open_terminal(monkeypatch)
    set_up_console(0)
    with Progress("epoch 1/2", total=4, done=2) as progress:
        progress.set_status("812 images/s")
        progress.advance(1)
        progress._bar.refresh()
    assert "epoch 1/2" in terminal.getvalue()
    assert "3/4" in terminal.getvalue()
    assert "812 images/s" in terminal.getvalue()


def test_other_ranks_draw_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _open_terminal(monkeypatch)
    with Progress("epoch", total=2, show=False) as progress:
        progress.advance(1)
    assert terminal.getvalue() == ""


def test_without_a_terminal_a_line_comes_every_so_many_batches(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_console(0)
    with Progress("center224", total=5, every=2) as progress:
        for _ in range(5):
            progress.advance(1)
    assert capsys.readouterr().err.splitlines() == ["center224: 2/5 batches", "center224: 4/5 batches"]


def test_without_a_terminal_silence_is_broken_after_half_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_console(0)
    times_s = iter([0.0, 20.0, 31.0, 31.0, 40.0, 40.0, 65.0, 71.0, 71.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times_s))
    with Progress("validation", total=9) as progress:
        for _ in range(3):  # at 20 s, 31 s (a line) and 40 s
            progress.advance(1)
        progress.set_status("a line of its own")
        for _ in range(2):  # at 65 s and 71 s (a line)
            progress.advance(1)
    assert capsys.readouterr().err.splitlines() == ["validation: 2/9 batches", "validation: 5/9 batches"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (90061, "25:01:01")])
def test_durations_are_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
