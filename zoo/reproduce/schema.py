"""What a reproduced table or figure consists of, and the verdicts on its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Value = float | str | None
Kind = Literal["printed", "derived", "authors' log", "read off a figure"]


@dataclass(frozen=True)
class Published:
    """What a paper or its authors have: a ``value``, of what ``kind`` it is, and the ``place`` where it is found.

    The kinds: "printed" in the text or a table of the paper; "derived" from what is printed; "authors' log" stands in
    an output that their public code has kept; "read off a figure" is as exact as an eye.
    """

    value: float | str
    kind: Kind
    place: str


@dataclass(frozen=True)
class Figure:
    """One number: published (None: nothing was), measured (None: not run), and what follows from both."""

    what: str
    published: Published | None
    measured: Value
    unit: str
    verdict: str


@dataclass(frozen=True)
class Line:
    """A curve of a panel; one with ``is_theory`` follows from a formula, not from a measurement.

    Curves of the same ``group`` have the same colour; a ``note`` is written beside the last point.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    is_theory: bool = False
    group: str = ""
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a plot, each axis linear or logarithmic."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False


@dataclass
class Section:
    """A table or figure of a paper: ``key`` names its plot's file, ``setting`` says what was measured, and how."""

    key: str
    title: str
    setting: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0


def compare(what: str, published: Published, measured: float, unit: str, tolerance: float) -> Figure:
    """Return the figure with the relative difference as its verdict; ``tolerance`` is relative too."""
    difference = measured / float(published.value) - 1
    close = abs(difference) <= tolerance
    verdict = f"within {100 * tolerance:g} %" if close else f"off by {100 * difference:+.1f} %"
    return Figure(what, published, measured, unit, verdict)


def compare_decades(what: str, published: Sequence[Published], measured: Sequence[float]) -> Figure:
    """Return the figure of one or two values that span decades: it matters whether one is twice the other, or half.

    Two are the first and the last of a curve, with a verdict on each.
    """
    verdicts = [_by_factor(ours / float(theirs.value)) for ours, theirs in zip(measured, published, strict=True)]
    if len(set(verdicts)) > 1:
        verdicts = [f"{end} {verdict}" for end, verdict in zip(("first", "last"), verdicts, strict=True)]
    theirs, ours = (" to ".join(f"{value:.2g}" for value in values)
                    for values in ([float(p.value) for p in published], measured))  # fmt: skip
    joined = replace(published[0], value=theirs)
    return Figure(what, joined, ours, "", ", ".join(dict.fromkeys(verdicts)))


def _by_factor(factor: float) -> str:
    if 0.5 <= factor <= 2:
        return "within a factor of 2"
    return "higher" if factor > 1 else "lower"


def at_least(what: str, published: Published, measured: float, unit: str) -> Figure:
    """Return the figure of a ratio that is to be as large as the published one."""
    difference = measured / float(published.value) - 1
    verdict = "reached" if difference >= 0 else f"off by {100 * difference:+.1f} %"
    return Figure(what, published, measured, unit, verdict)


def within_axis(what: str, top: Published, measured: float, unit: str) -> Figure:
    """Return the figure of a curve's largest value, of which the published plot shows only where its axis ends."""
    verdict = "within the axis" if measured <= float(top.value) else "off: above the axis"
    published = replace(top, value=f"axis to {top.value:g}")
    return Figure(what, published, measured, unit, verdict)


def trend(what: str, published: Published, measured: Sequence[float], unit: str) -> Figure:
    """Return the figure of a curve of which it is published whether it "rises" or "falls" from its first to its last.

    The verdict is what the measured one does.
    """
    first, last = measured[0], measured[-1]
    found = "rises" if last > first else "falls"
    verdict = found if found == published.value else f"{found}, not as published"
    return Figure(what, published, f"{first:.2g} to {last:.2g}", unit, verdict)


def unpublished(what: str, measured: Value, unit: str = "") -> Figure:
    """Return the figure of something that the paper does not have."""
    return Figure(what, None, measured, unit, "nothing published")


def not_run(what: str, published: Published | None, unit: str, command: str) -> Figure:
    """Return the figure that ``command`` would measure."""
    return Figure(what, published, None, unit, f"not run: `{command}`")


def finite_line(label: str, x: Sequence[float], y: Sequence[float], is_theory: bool = False) -> Line:
    """Return the curve without the points that have no finite ``y``: a logarithmic axis and JSON have none either."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    return Line(label, [a for a, _ in points], [b for _, b in points], is_theory)
