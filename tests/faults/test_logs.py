"""Names and settings from outside reach logs and terminals with any characters."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from zoo.config.experiment import Experiment
from zoo.run.console import set_up_console
from zoo.run.run_log import RunLog

FORGED = "left out: a.png\n2026-01-01 00:00:00,000 - epoch 9 validation: top-1 99.00\x1b[31m\rred"


@pytest.fixture(autouse=True)
def _console() -> None:
    set_up_console(0)


def test_names_cannot_forge_log_lines_or_terminal_colors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_console(0)
    with RunLog(tmp_path, 0, Experiment()):
        logging.getLogger("zoo").info("%s", FORGED)
    for text in ((tmp_path / "training_0.log").read_text(), capsys.readouterr().err):
        first, second = text.splitlines()
        assert first.endswith("left out: a.png")
        assert second == "    2026-01-01 00:00:00,000 - epoch 9 validation: top-1 99.00\\x1b[31m\\rred"


def test_file_name_other_than_utf_8_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Otherwise pytest would store the name in its report, which cannot be sent between its processes.
    monkeypatch.setattr(logging.getLogger("zoo"), "propagate", False)
    set_up_console(0)
    with RunLog(tmp_path, 0, Experiment()):
        logging.getLogger("zoo").info("%s", "left out: bad\udcff.png")
    assert "left out: bad\\udcff.png" in (tmp_path / "training_0.log").read_text()
    assert "Logging error" not in capsys.readouterr().err


def test_terminal_of_another_encoding_shows_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True))
    set_up_console(0)
    print("été.png, bad\udcff.png")
    logging.getLogger("zoo").warning("日本.png")
    assert raw.getvalue() == b"\\xe9t\\xe9.png, bad\\udcff.png\n\\u65e5\\u672c.png\n"
