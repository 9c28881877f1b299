"""The budget: how much recomputation of convolutions and matrix products is allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from zoo.errors import ConfigError

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


class Budget:
    """The limit up to which convolutions and matrix products are recomputed.

    Args:
    - `flops_per_byte`: recompute operations up to this many FLOP per byte of output; raised by `observe`.
    - `held_bytes`: limit on the bytes held between forward and backward; None for no limit.
    - `held_share`: the same limit as a fraction of the bytes that plain training holds.
    """

    def __init__(
        self, flops_per_byte: float = 0.0, held_bytes: int | None = None, held_share: float | None = None
    ) -> None:
        self.flops_per_byte, self._held_bytes, self._held_share = flops_per_byte, held_bytes, held_share

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Return the budget for a user's value (see `zoo.lean`); raise ConfigError if it is invalid."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if isinstance(value, str):
            found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*FLOP/B\s*", value)
            if found:
                return cls(float(found[1]))
        elif isinstance(value, bool):
            pass
        elif isinstance(value, int) and value > 0:
            return cls(held_bytes=value)
        elif isinstance(value, float) and 0 < value < 1:
            return cls(held_share=value)
        raise ConfigError(
            f"budget {value!r} is invalid: pass a positive number of bytes (int), a fraction of what plain training "
            'holds (float between 0 and 1), a cost limit such as "40 FLOP/B", or None to recompute no convolutions'
        )

    def held_limit(self, plain_bytes: int) -> float:
        """Return the limit on the bytes held, if plain training holds ``plain_bytes``; infinity without one."""
        if self._held_bytes is not None:
            return self._held_bytes
        return float("inf") if self._held_share is None else self._held_share * plain_bytes

    @property
    def is_limited(self) -> bool:
        """Whether the budget limits bytes, so that forward passes have to be observed."""
        return self._held_bytes is not None or self._held_share is not None

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
