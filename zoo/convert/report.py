"""What a conversion did, and how exactly the result computes what the source computed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConversionReport:
    """The report of one conversion.

    ``layers``: names of the layers whose weights or activation changed. ``kept``: norms that could not be folded.
    ``clamped``: number of scales per norm that in-place norms cannot represent and that became eps.
    ``exact``: the result computes the same up to the rounding of the weights' kind of number;
    ``reason`` says why, or why not.
    ``max_difference``: the largest absolute difference of the outputs, of which ``max_output`` is the largest absolute
    value, both in float64 evaluation mode; None where the networks were not compared.
    """

    conversion: str
    arch: str
    layers: tuple[str, ...]
    exact: bool
    reason: str
    kept: tuple[str, ...] = ()
    clamped: dict[str, int] = field(default_factory=dict)
    max_difference: float | None = None
    max_output: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        content = asdict(self)
        exact = content.pop("exact")
        return {**content, "exactness": "exact" if exact else "approximate"}

    def __str__(self) -> str:
        lines = [
            f"{self.conversion} {self.arch}: {'exact' if self.exact else 'approximate'}, {self.reason}",
            f"  layers touched: {_listed(self.layers)}",
        ]
        if self.kept:
            lines.append(f"  norms kept: {_listed(self.kept)}")
        if self.clamped:
            counts = tuple(f"{name}: {count}" for name, count in self.clamped.items())
            lines.append(f"  norms with scales set to eps: {_listed(counts)}")
        if self.max_difference is None:
            lines.append("  outputs: not compared")
        else:
            lines.append(
                f"  outputs: largest difference {self.max_difference:.2e}, "
                f"largest output {self.max_output:.2e} (float64)"
            )
        return "\n".join(lines)


def _listed(names: tuple[str, ...], shown: int = 6) -> str:
    rest = f", ... ({len(names) - shown} more; --json lists all)" if len(names) > shown else ""
    return f"{len(names)}" + (f" ({', '.join(names[:shown])}{rest})" if names else "")
