"""The tiny finished run of the command line's tests."""

from __future__ import annotations

import pytest

from tests.cli.conftest import finished

__all__ = ["finished"]


@pytest.fixture
def count(examples: int) -> int:
    """Return the number of cases of a test of `tests.faults.fuzz`."""
    return examples
