"""Long measurements print their progress on a terminal and erase it."""

from __future__ import annotations

import io
import sys
import time

import pytest

import zoo
from tests.remat.programs import images, network
from zoo.memory import progress as module
from zoo.memory.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> Terminal:
    """Return a replacement of stderr. Not a fixture, because pytest sets stderr again before a test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "DELAY_S", delay_s)
    return terminal


def test_long_step_is_shown_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch, 0.05)
    with show_progress("zoo.check") as show:
        show("plain training")
        time.sleep(0.5)
        assert "zoo.check: plain training (00:00)" in terminal.getvalue()
        show("lean training")
        assert "zoo.check: lean training" in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-1].strip() == ""  # the line is erased


def test_short_measurement_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch, 60)
    with show_progress("zoo.check") as show:
        show("plain training")
    assert "plain" not in terminal.getvalue()


def test_nothing_is_shown_without_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY_S", 0.01)
    with show_progress("zoo.check") as show:
        show("plain training")
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_memory_report_names_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch, 1e-9)
    model = network()
    report = zoo.memory_report(model, images(32))
    for step in ("bytes held", "a plain step", "a lean step"):
        assert f"zoo.memory_report: {step}" in terminal.getvalue()
    monkeypatch.undo()
    assert zoo.memory_report(model, images(32)) == report
