"""Cheap measurements: one round of timing, and a heap that each measured step collects quickly."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time checks once: no test compares times."""
    monkeypatch.setattr("zoo.memory.check.ROUNDS", 1)


@pytest.fixture(autouse=True)
def _frozen_heap_per_test() -> None:
    """Freeze what earlier tests imported, because each measured step collects garbage."""
    gc.collect()
    gc.freeze()
