"""The results of the back ends. Each is computed once: Triton's interpreter is slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.ops.back_ends import results_of


@pytest.fixture(scope="session")
def results() -> Callable[[str], dict[str, Any]]:
    return cache(results_of)
