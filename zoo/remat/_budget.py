"""The budget: a limit on the memory of training."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from zoo.errors import ConfigError

UNITS = {
    "": 1, "B": 1,
    **{unit: 10 ** (3 * power) for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}B": 10 ** (3 * power) for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}IB": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)},
}  # fmt: skip
NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
MIN_LIMIT_BYTES = 10**4  # a smaller int probably means GB


class Budget:
    """A limit on memory, within which as little as possible is recomputed.

    Args:
    - `share`: limit on the bytes saved and recomputed at any time of backward, as a fraction of the bytes that plain
      training saves. None: no such limit.
    - `peak_bytes`: limit on the peak memory of a training step. None: no such limit.
    """

    def __init__(self, share: float | None = None, peak_bytes: int | None = None) -> None:
        self.share, self.peak_bytes = share, peak_bytes
        self.limiter: Any = None  # the `Limiter` of the passes; None before the first

    def __getstate__(self) -> dict[str, Any]:
        """Return the limits; a copy of a network makes its own plans."""
        return {**vars(self), "limiter": None}

    @property
    def has_limit(self) -> bool:
        """Whether there is a limit. Without one, convolutions and matrix products are not recomputed."""
        return self.share is not None or self.peak_bytes is not None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Return the budget for a user's value (see `zoo.lean`); raise ConfigError if it is invalid."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if isinstance(value, str):
            share = re.fullmatch(rf"\s*({NUMBER})\s*%\s*", value)
            if share:
                value = float(share[1]) / 100
            elif value.strip()[-1:].isalpha():  # a number alone is ambiguous
                with suppress(ConfigError):
                    value = parse_bytes(value)
        if type(value) is int and value >= MIN_LIMIT_BYTES:
            return cls(peak_bytes=value)
        if isinstance(value, float) and 0 < value <= 1:
            return cls(share=value if value < 1 else None)
        is_small = type(value) is int and 0 < value < MIN_LIMIT_BYTES
        hint = f'; if you mean {value} GB, write "{value}GB"' if is_small else ""
        raise ConfigError(
            f"budget {value!r} is invalid{hint}: pass a limit on the peak memory of a training step (bytes as an int, "
            'or "8GB"), a fraction of what plain training saves (float up to 1, or "50%"), or None to recompute no '
            "convolutions"
        )


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as "16GiB" or "500 MB". Raises ConfigError for any other text."""
    match = re.fullmatch(rf"({NUMBER})\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is not an amount of memory", remedy="write it as 16GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_limit(value: Any, place: str) -> int:
    """Return the number of bytes of a limit, written as for `Budget.parse`. Raises ConfigError for other values."""
    with suppress(ConfigError):
        limit = Budget.parse(value).peak_bytes
        if limit is not None:
            return limit
    remedy = f'write it as "24GB" or "22 GiB", or as an int of at least {MIN_LIMIT_BYTES} bytes'
    raise ConfigError(f"{value!r} is not an amount of memory", place, remedy)
