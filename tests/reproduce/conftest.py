"""What takes time and is not what most tests look at."""

from __future__ import annotations

import pytest

from zoo.reproduce import error_rates

OPERATIONS = 1e15


@pytest.fixture(autouse=True)
def _operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each training take as many operations, which only tests/reproduce/test_scoreboard_files.py counts."""
    monkeypatch.setattr(error_rates, "operations_of", lambda *_: OPERATIONS)
