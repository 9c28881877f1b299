"""The heap is configured where the C library allows it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from zoo.memory.timing import keep_heap


@pytest.mark.parametrize(
    ("library", "description"),
    [
        (SimpleNamespace(mallopt=lambda option, value: 1), "heap kept (mallopt: no mmap, no trim)"),
        (SimpleNamespace(mallopt=lambda option, value: 0), "system default"),
        (SimpleNamespace(), "system default"),
    ],
)
def test_configuration_of_heap_is_described(library: object, description: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert keep_heap() == description
