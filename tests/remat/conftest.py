"""Fixtures of tests that compile, and of tests in which memory is freed at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """Forget the graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let nothing wait for the collector of cycles."""
    gc.disable()
    yield
    gc.enable()
