"""The budget: how much recomputation of convolutions and matrix products is allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from zoo.errors import ConfigError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
RECOMPUTED = "recomputed in backward"  # the reason to save a recipe
INPUT = "input of a recipe"  # the reason to save a tensor that autograd itself does not need


class Decision(NamedTuple):
    """The decision about a tensor that autograd saves, or that is an input of a recipe.

    Args:
    - `made_by`: name of the operation that computed it, such as "aten.convolution"; "" if it existed before forward.
    - `bytes`: size of its memory; 0 if that stays alive anyway, like the memory of a parameter.
    - `is_kept`: whether the tensor is saved, rather than its recipe.
    - `reason`: why.
    - `flops_per_byte`: cost of recomputing it, if it is the output of a convolution or a matrix product.
    - `place`: name of the module that was running.
    """

    made_by: str
    bytes: int
    is_kept: bool
    reason: str
    flops_per_byte: float | None
    place: str

    @property
    def plain_bytes(self) -> int:
        """Bytes held in plain training."""
        return 0 if self.reason == INPUT else self.bytes

    @property
    def lean_bytes(self) -> int:
        """Bytes held in lean training."""
        return self.bytes if self.is_kept else 0


class Planned(NamedTuple):
    """A training step for which a limit on its peak was met.

    Args:
    - `step_bytes`: its peak, without what existed before forward.
    - `input_bytes`: bytes of the inputs of forward.
    """

    step_bytes: int
    input_bytes: int


class Budget:
    """The limit up to which convolutions and matrix products are recomputed.

    Args:
    - `flops_per_byte`: recompute operations up to this many FLOP per byte of output; set by `observe` and by
      `zoo.remat.planning`.
    - `peak_bytes`: limit on the bytes that exist at any time of a training step; None for no limit.
    - `held_share`: limit on the bytes held between forward and backward, as a fraction of those of plain training.
    """

    def __init__(
        self, flops_per_byte: float = 0.0, peak_bytes: int | None = None, held_share: float | None = None
    ) -> None:
        self.flops_per_byte, self.peak_bytes, self._held_share = flops_per_byte, peak_bytes, held_share
        self.planned: Planned | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Return the budget for a user's value (see `zoo.lean`); raise ConfigError if it is invalid."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if isinstance(value, str):
            found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*FLOP/B\s*", value)
            if found:
                return cls(float(found[1]))
            if value.strip().upper().endswith("B"):  # a number alone might mean either
                with suppress(ConfigError):
                    value = parse_bytes(value)
        if type(value) is int and value > 0:
            return cls(peak_bytes=value)
        if isinstance(value, float) and 0 < value < 1:
            return cls(held_share=value)
        raise ConfigError(
            f"budget {value!r} is invalid: pass a limit on the peak memory of a training step (a positive int or "
            '"8GB"), a fraction of what plain training holds (float between 0 and 1), a cost limit such as '
            '"40 FLOP/B", or None to recompute no convolutions'
        )

    def held_limit(self, plain_bytes: int) -> float:
        """Return the limit on the bytes held, if plain training holds ``plain_bytes``; infinity without one."""
        return float("inf") if self._held_share is None else self._held_share * plain_bytes

    @property
    def is_observed(self) -> bool:
        """Whether forward passes have to be observed to meet the limit."""
        return self._held_share is not None

    def check_possible(self, least_bytes: int) -> None:
        """Raise ConfigError if a step that recomputes all it can takes more than the limit."""
        if self.peak_bytes is not None and least_bytes > self.peak_bytes:
            raise ConfigError(
                f"a training step takes at least {bytes_text(least_bytes)}, more than the limit of "
                f"{bytes_text(self.peak_bytes)}",
                "budget of zoo.lean",
                "raise the limit, or train with smaller batches",
            )

    def observe(self, decisions: Iterable[Decision]) -> None:
        """Raise ``flops_per_byte`` if the forward pass with these decisions held more than the limit."""
        held = plain = 0
        candidates: Counter[float] = Counter()
        for decision in decisions:
            held += decision.lean_bytes
            plain += decision.plain_bytes
            if decision.is_kept and decision.flops_per_byte is not None:
                candidates[decision.flops_per_byte] += decision.bytes
        limit = self.held_limit(plain)
        for flops_per_byte in sorted(candidates):
            if held <= limit:
                return
            held -= candidates[flops_per_byte]
            self.flops_per_byte = max(self.flops_per_byte, flops_per_byte)


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "16GiB" or "500 MB"; raises ConfigError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is not an amount of memory", remedy="write it as 16GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def bytes_text(count: float) -> str:
    """Return a number of bytes as in "8.59 GB" or "312.40 MB"."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
