"""The results of the Triton kernels in Triton's interpreter, which takes long and runs once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.ops.triton_stub import interpret


@pytest.fixture(scope="session")
def interpreted() -> Callable[[], dict[str, Any]]:
    return cache(lambda: interpret("tests.ops.norm_cases"))
