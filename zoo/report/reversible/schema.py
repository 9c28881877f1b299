"""What a reproduced table or figure consists of, and the verdicts on its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Value = float | str | None


@dataclass(frozen=True)
class Figure:
    """One number: published (None: nothing was), measured (None: not run), and what follows from both."""

    what: str
    published: Value
    measured: Value
    unit: str
    verdict: str


@dataclass(frozen=True)
class Line:
    """A curve of a panel; one without markers (``is_theory``) is a formula, not a measurement."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_theory: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a picture, each axis linear or logarithmic."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False


@dataclass
class Section:
    """A table or figure of a paper: ``key`` names its picture's file, ``setting`` says what was measured, and how."""

    key: str
    title: str
    setting: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0


def compare(what: str, published: float, measured: float, unit: str, tolerance: float) -> Figure:
    """Return the figure with the relative difference as its verdict; ``tolerance`` is relative too."""
    difference = measured / published - 1
    close = abs(difference) <= tolerance
    verdict = f"within {100 * tolerance:g} %" if close else f"off by {100 * difference:+.1f} %"
    return Figure(what, published, measured, unit, verdict)


def at_least(what: str, published: float, measured: float, unit: str) -> Figure:
    """Return the figure of a ratio that is to be as large as the published one."""
    verdict = "reached" if measured >= published else f"off by {100 * (measured / published - 1):+.1f} %"
    return Figure(what, published, measured, unit, verdict)


def at_most(what: str, bound: float, measured: float, unit: str) -> Figure:
    """Return the figure of something that was published as a bound."""
    verdict = "within the bound" if measured <= bound else "off: above the bound"
    return Figure(what, f"at most {bound:g}", measured, unit, verdict)


def unpublished(what: str, measured: Value, unit: str = "") -> Figure:
    """Return the figure of something that the paper does not have."""
    return Figure(what, None, measured, unit, "nothing published")


def not_run(what: str, published: Value, unit: str, command: str) -> Figure:
    """Return the figure that ``command`` would measure."""
    return Figure(what, published, None, unit, f"not run: `{command}`")


def finite_line(label: str, x: Sequence[float], y: Sequence[float], is_theory: bool = False) -> Line:
    """Return the curve without the points that have no finite ``y``: a logarithmic axis and JSON have none either."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    return Line(label, [a for a, _ in points], [b for _, b in points], is_theory)
