"""One round of timing per check: no test compares times."""

import pytest


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.memory.check.ROUNDS", 1)
