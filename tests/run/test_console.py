"""Text and progress bars share the terminal; where there is none, lines take the bar's place."""

from __future__ import annotations

import logging

import pytest

from zoo.run import console
from zoo.run.console import Progress, set_up_console


def test_rank_0_prints_notices_and_the_others_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        set_up_console(rank)
        logging.getLogger("zoo.data").info("notice")
        logging.getLogger("zoo.data").warning("warning")
    assert capsys.readouterr().err.splitlines() == ["notice", "warning", "rank 1: warning"]


def test_without_terminal_line_is_printed_every_few_batches(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_console(0)
    with Progress("center224", total=5, every=2) as progress:
        for _ in range(5):
            progress.advance(1)
    assert capsys.readouterr().err.splitlines() == ["center224: 2/5", "center224: 4/5"]


def test_without_terminal_progress_is_printed_after_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_console(0)
    times_s = iter([0.0, 20.0, 31.0, 31.0, 40.0, 65.0, 65.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times_s))
    with Progress("validation", total=9) as progress:
        for _ in range(4):  # at 20 s, 31 s (a line), 40 s and 65 s (a line)
            progress.advance(1)
    assert capsys.readouterr().err.splitlines() == ["validation: 2/9", "validation: 4/9"]


def test_loop_that_logs_its_own_lines_prints_no_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_console(0)
    monkeypatch.setattr(console, "HEARTBEAT_S", -1.0)
    with Progress("epoch 1/4", total=2, lines=False) as progress:
        progress.advance(1)
        progress.set_status("a line of its own")
    assert capsys.readouterr().err == ""
