"""The parts of a reproduced table or figure, and the verdicts on its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Value = float | str | None
Kind = Literal["printed", "derived", "authors' log", "read off a figure"]


@dataclass(frozen=True)
class PublishedValue:
    """A number or statement of a paper or its authors.

    Args:
    - `value`: the number, or the words that stand in its place ("rises").
    - `kind`: "printed" in the text or a table of the paper; "derived" from what is printed; "authors' log" for an
      output that the authors' public code has kept; "read off a figure", which is only as exact as the eye.
    - `place`: where it is found, such as "Table 3".
    """

    value: float | str
    kind: Kind
    place: str


@dataclass(frozen=True)
class Comparison:
    """One number of a table or figure: what was published, what was measured, and what follows from both.

    Args:
    - `what`: what the number measures.
    - `published`: None where nothing was published.
    - `measured`: None where nothing was measured; ``verdict`` then says why.
    - `unit`: of both numbers.
    - `verdict`: how far the measured number is from the published one.
    """

    what: str
    published: PublishedValue | None
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
    """A section of a report: one table or figure of a paper.

    Args:
    - `key`: a word such as "table3", which the file of its plot is named after.
    - `title`: the heading.
    - `setting`: what was measured, and how.
    - `comparisons`: the rows of its table.
    - `notes`: what a reader must know to judge the comparisons.
    - `panels`: what its plot shows; without panels there is no plot.
    - `seconds`: how long it took to measure.
    """

    key: str
    title: str
    setting: str
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0


def compare(what: str, published: PublishedValue, measured: float, unit: str, tolerance: float) -> Comparison:
    """Return the comparison whose verdict is the relative difference; ``tolerance`` is relative too."""
    difference = measured / float(published.value) - 1
    return Comparison(what, published, measured, unit, within(difference, tolerance))


def within(difference: float, tolerance: float) -> str:
    """Return the verdict on a relative difference."""
    return f"within {100 * tolerance:g} %" if abs(difference) <= tolerance else off_by(difference)


def off_by(difference: float) -> str:
    """Return the verdict on a relative difference that is too large."""
    return f"off by {100 * difference:+.1f} %"


def compare_decades(what: str, published: Sequence[PublishedValue], measured: Sequence[float]) -> Comparison:
    """Return the comparison of values that span decades, so that only a factor of more than 2 matters.

    There is one value, or there are two, the first and the last of a curve, and each gets a verdict.
    """
    verdicts = [_by_factor(ours / float(theirs.value)) for ours, theirs in zip(measured, published, strict=True)]
    if len(set(verdicts)) > 1:
        verdicts = [f"{end} {verdict}" for end, verdict in zip(("first", "last"), verdicts, strict=True)]
    theirs, ours = (" to ".join(f"{value:.2g}" for value in values)
                    for values in ([float(p.value) for p in published], measured))  # fmt: skip
    joined = replace(published[0], value=theirs)
    return Comparison(what, joined, ours, "", ", ".join(dict.fromkeys(verdicts)))


def _by_factor(factor: float) -> str:
    if 0.5 <= factor <= 2:
        return "within a factor of 2"
    return "higher" if factor > 1 else "lower"


def compare_minimum(what: str, published: PublishedValue, measured: float, unit: str) -> Comparison:
    """Return the comparison of a ratio that should be at least as large as the published one."""
    difference = measured / float(published.value) - 1
    return Comparison(what, published, measured, unit, "reached" if difference >= 0 else off_by(difference))


def compare_with_axis(what: str, top: PublishedValue, measured: float, unit: str) -> Comparison:
    """Return the comparison of a curve's largest value with the ``top`` of the axis of the published plot.

    It is for plots that show only that their curve stays within the axis.
    """
    verdict = "within the axis" if measured <= float(top.value) else "off: above the axis"
    published = replace(top, value=f"axis to {top.value:g}")
    return Comparison(what, published, measured, unit, verdict)


def compare_trend(what: str, published: PublishedValue, measured: Sequence[float], unit: str) -> Comparison:
    """Return the comparison of a curve that, as published, "rises" or "falls" from its first value to its last.

    The verdict says what the measured curve does.
    """
    first, last = measured[0], measured[-1]
    direction = "rises" if last > first else "falls"
    verdict = direction if direction == published.value else f"{direction}, not as published"
    return Comparison(what, published, f"{first:.2g} to {last:.2g}", unit, verdict)


def unpublished(what: str, measured: Value, unit: str = "") -> Comparison:
    """Return the entry of a measured number that the paper does not have."""
    return Comparison(what, None, measured, unit, "nothing published")


def not_run(what: str, published: PublishedValue | None, unit: str, command: str) -> Comparison:
    """Return the comparison of a number that was not measured; ``command`` would measure it."""
    return Comparison(what, published, None, unit, f"not run: `{command}`")
