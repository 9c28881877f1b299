"""Records of several processes that share a terminal do not run together."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from zoo.run.console import ConsoleHandler


def test_record_and_line_break_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    ConsoleHandler().emit(logging.makeLogRecord({"msg": "3 class folders"}))
    assert [text for text in written if text] == ["3 class folders\n"]
