"""Fixtures of tests that compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """Forget the graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
