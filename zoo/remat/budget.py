"""The budget: how much recomputation of convolutions and matrix products is allowed.

Tested by tests/remat/test_rematerializer.py.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import Any, NamedTuple

from zoo.errors import ConfigError

UNITS = {
    "": 1, "B": 1,
    **{unit: 10 ** (3 * power) for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}B": 10 ** (3 * power) for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}IB": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)},
}  # fmt: skip
NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
NUM_SKIPPED = 100  # calls that run plainly after one that had no large tensor
MAX_SIGNATURES = 32  # of such calls
LEAST_BYTES = 10**4  # a smaller int is no limit in bytes: it may mean GB
RECOMPUTED = "recomputed in backward"  # the reason to save a recipe
INPUT = "input of a recipe"  # the reason to save a tensor that autograd itself does not need
INTERMEDIATE = "recomputed for other tensors"  # a product that autograd does not save


class Decision(NamedTuple):
    """The decision about a tensor that autograd saves, or that is an input or an expensive intermediate of a recipe.

    Args:
    - `made_by`: name of the operation that computed it, such as "aten.convolution"; "" if it existed before forward.
    - `bytes`: size of its memory; 0 if it stays alive anyway, like the memory of a parameter.
    - `plain_bytes`: bytes that plain training holds for it; 0 if another decision has counted its memory.
    - `is_kept`: whether the tensor is saved, rather than its recipe.
    - `reason`: the reason for the decision.
    - `flops_per_byte`: cost of recomputing it, if it is the output of a convolution or a matrix product.
    - `place`: name of the module that was running.
    """

    made_by: str
    bytes: int
    plain_bytes: int
    is_kept: bool
    reason: str
    flops_per_byte: float | None
    place: str

    @property
    def lean_bytes(self) -> int:
        """Bytes held in lean training."""
        return self.bytes if self.is_kept else 0


class StepPeak(NamedTuple):
    """Peak memory of a measured training step in bytes, excluding what existed before forward.

    Args:
    - `peak`: the peak if backward allocates the gradients.
    - `accumulating`: the peak if backward accumulates into existing gradients.
    """

    peak: int
    accumulating: int


class Planned:
    """Measured training steps, from which the price for any amount of available memory is looked up.

    Args:
    - `input_bytes`: bytes of the inputs of forward.
    - `sizes`: prices in FLOP per byte -> bytes of the outputs that are recomputed at this price.
    - `steps`: prices up to which operations were recomputed -> the step.
    - `keeps_outputs`: whether the outputs were alive in backward.
    """

    def __init__(self, input_bytes: int, sizes: dict[float, int], least: StepPeak, keeps_outputs: bool) -> None:
        self.input_bytes, self.sizes, self.keeps_outputs = input_bytes, sizes, keeps_outputs
        self.prices = [0.0, *sorted(sizes)]
        self.steps = {self.prices[-1]: least}
        self._is_bound = True

    def add(self, price: float, step: StepPeak) -> None:
        """Add a measured step."""
        self._is_bound &= step.peak <= self.bytes_at(price, accumulates=False)
        self.steps[price] = step

    def bytes_at(self, price: float, *, accumulates: bool) -> int:
        """Return a bound on the peak of a step.

        Saving an output adds its bytes to the peak at most. Where a measurement has shown otherwise, the bound is the
        next measured step that saves more.
        """
        peaks = {each: step.accumulating if accumulates else step.peak for each, step in self.steps.items()}
        below = max((each for each in peaks if each <= price), default=None)
        above = min(each for each in peaks if each >= price)
        bounds = [] if below is None else [peaks[below]]
        if self._is_bound or price == above:
            saved = sum(size for each, size in self.sizes.items() if price < each <= above)
            bounds.append(peaks[above] + saved)
        return min(bounds, default=sys.maxsize)

    def lowest_price(self, room: float, *, accumulates: bool) -> float | None:
        """Return the lowest price at which a step takes at most ``room`` bytes; None if there is none."""
        fitting = (each for each in self.prices if self.bytes_at(each, accumulates=accumulates) <= room)
        return next(fitting, None)


class Budget:
    """The limit up to which convolutions and matrix products are recomputed.

    Args:
    - `flops_per_byte`: recompute operations up to this many FLOP per byte of output; set by `zoo.remat.planning` if
      there is a limit.
    - `peak_bytes`: limit on the bytes that exist at any time of a training step; None for no limit.
    - `held_share`: limit on the bytes held between forward and backward, as a fraction of the bytes of plain training.
    """

    def __init__(
        self, flops_per_byte: float = 0.0, peak_bytes: int | None = None, held_share: float | None = None
    ) -> None:
        self.flops_per_byte, self.peak_bytes, self.held_share = flops_per_byte, peak_bytes, held_share
        self.planned: Planned | None = None
        self._small: dict[Any, int] = {}  # signatures of calls -> how many more of them are skipped

    def note_small(self, signature: Any) -> None:
        """Record that a call computed no tensor that is large enough for a recipe."""
        if not self.has_limit and len(self._small) < MAX_SIGNATURES:
            self._small[signature] = NUM_SKIPPED

    def skips(self, signature: Any) -> bool:
        """Return whether a call runs as plain training, because the last call like it had no tensor to recompute.

        After `NUM_SKIPPED` such calls one is recorded again, because the network may have grown.
        """
        left = self._small.get(signature) if self._small else None
        if left is None:
            return False
        if left == 0:
            del self._small[signature]
            return False
        self._small[signature] = left - 1
        return True

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Return the budget for a user's value (see `zoo.lean`); raise ConfigError if it is invalid."""
        if value is None or isinstance(value, cls):
            return value or cls()
        if isinstance(value, str):
            price = re.fullmatch(rf"\s*({NUMBER})\s*FLOPs?\s*/\s*B(?:yte)?\s*", value, re.IGNORECASE)
            share = re.fullmatch(rf"\s*({NUMBER})\s*%\s*", value)
            if price:
                return cls(float(price[1]))
            if share:
                value = float(share[1]) / 100
            elif value.strip()[-1:].isalpha():  # a number alone might mean either
                with suppress(ConfigError):
                    value = parse_bytes(value)
        if type(value) is int and value >= LEAST_BYTES:
            return cls(peak_bytes=value)
        if isinstance(value, float) and 0 < value <= 1:
            return cls(held_share=value if value < 1 else None)
        is_small = type(value) is int and 0 < value < LEAST_BYTES
        hint = f'; if you mean {value} GB, write "{value}GB"' if is_small else ""
        raise ConfigError(
            f"budget {value!r} is invalid{hint}: pass a limit on the peak memory of a training step (bytes as an int, "
            'or "8GB"), a fraction of what plain training holds (float up to 1, or "50%"), a cost limit such as '
            '"40 FLOP/B", or None to recompute no convolutions'
        )

    @property
    def has_limit(self) -> bool:
        """Whether `zoo.remat.planning` has to find ``flops_per_byte`` before the first step."""
        return self.peak_bytes is not None or self.held_share is not None

    def check_planned(self, place: str) -> None:
        """Raise ConfigError if there is a limit and no step was planned."""
        if self.has_limit and self.planned is None:
            raise ConfigError(
                "a memory limit needs a module whose training steps can be measured",
                place,
                'use zoo.lean(model, "8GB") or zoo.lean(model, 0.4), or pass a cost limit such as "40 FLOP/B"',
            )

    def held_limit(self, plain_bytes: int) -> float:
        """Return the limit on the bytes held if plain training holds ``plain_bytes``; infinity without a limit."""
        return float("inf") if self.held_share is None else self.held_share * plain_bytes


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "16GiB" or "500 MB"; raises ConfigError for any other text."""
    match = re.fullmatch(rf"({NUMBER})\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is not an amount of memory", remedy="write it as 16GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_limit(value: Any, place: str) -> int:
    """Return the bytes of an amount of memory, written as for `Budget.parse`. Raises ConfigError for other values."""
    with suppress(ConfigError):
        limit = Budget.parse(value).peak_bytes
        if limit is not None:
            return limit
    remedy = f'write it as "24GB" or "22 GiB", or as an int of at least {LEAST_BYTES} bytes'
    raise ConfigError(f"{value!r} is not an amount of memory", place, remedy)


def bytes_text(count: float) -> str:
    """Return a number of bytes as in "8.59 GB" or "312.40 MB"."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
