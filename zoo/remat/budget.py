"""How much recomputation of convolutions and matrix products is allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from zoo.errors import ConfigError

START = "a recipe starts from it"  # the reason to keep a tensor that autograd itself does not need


class Decision(NamedTuple):
    """What became of a tensor that autograd saves, or that a recipe starts from.

    Args:
    - `made_by`: name of the operation that made it, such as "aten.convolution"; "" for one made before.
    - `bytes`: of its memory; 0 if that is kept anyway, as the memory of a parameter is.
    - `is_kept`: whether the tensor is kept, and not its recipe.
    - `reason`: why.
    - `flops_per_byte`: what computing it again would cost, if it is the output of a convolution or matrix product.
    - `place`: the recording's ``place`` at that time.
    """

    made_by: str
    bytes: int
    is_kept: bool
    reason: str
    flops_per_byte: float | None
    place: str

    @property
    def plain_bytes(self) -> int:
        """The bytes that autograd keeps without recipes."""
        return 0 if self.reason == START else self.bytes

    @property
    def lean_bytes(self) -> int:
        """The bytes that are kept with recipes."""
        return self.bytes if self.is_kept else 0


class Budget:
    """Which convolutions and matrix products may be computed again: those up to ``flops_per_byte``.

    Args:
    - `flops_per_byte`: floating-point operations for each byte of the output; changed by `observe`.
    - `held_bytes`: the bytes that a forward pass may leave held; None: no limit.
    - `held_share`: the same as a share of those of plain training.
    """

    def __init__(
        self, flops_per_byte: float = 0.0, held_bytes: int | None = None, held_share: float | None = None
    ) -> None:
        self.flops_per_byte, self._held_bytes, self._held_share = flops_per_byte, held_bytes, held_share

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Return the budget of a value as users write it; ConfigError for what is none."""
        if value is None:
            return cls()
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
            f"budget {value!r} is neither a whole number of bytes, nor a share between 0 and 1 of what plain training "
            'holds, nor a text such as "40 FLOP/B"; None computes no convolution again'
        )

    @property
    def is_limited(self) -> bool:
        """Whether the bytes held are limited, so that forward passes are observed."""
        return self._held_bytes is not None or self._held_share is not None

    def observe(self, decisions: Iterable[Decision]) -> None:
        """Allow more, if the forward pass with these decisions held more than the limit."""
        held = plain = 0
        candidates: Counter[float] = Counter()
        for decision in decisions:
            held += decision.lean_bytes
            plain += decision.plain_bytes
            if decision.is_kept and decision.flops_per_byte is not None:
                candidates[decision.flops_per_byte] += decision.bytes
        limit = self._held_bytes if self._held_bytes is not None else (self._held_share or 1.0) * plain
        for flops_per_byte in sorted(candidates):
            if held <= limit:
                return
            held -= candidates[flops_per_byte]
            self.flops_per_byte = max(self.flops_per_byte, flops_per_byte)
