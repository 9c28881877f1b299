"""Checks of refusals: an error names the keys and the values that caused it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refused(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object], *names: str) -> str:
    """Check that a call raises an error whose message contains the names, and return the message."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [name for name in names if name not in message]
    assert not missing, f"{missing} not in: {message}"
    return message
