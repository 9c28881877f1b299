"""The parts of a reproduced table or figure, and the verdicts on its numbers.

A verdict is a function of the published and the measured number, so that no file has to store it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from zoo.benchmark.plot_style import Panel
from zoo.reproduce.published_numbers import Evidence, PublishedNumber
from zoo.tables import number_text

MeasuredValue = float | str | None
State = Literal["reproduced", "better", "off", "underpowered", "not measured"]
FACTOR = 2.0  # tolerance of signal-to-noise ratios, which span 30 decades
ROUNDED = 0.05  # published numbers are rounded if their last digit is at most this fraction, and exact otherwise
MIN_RUNS = 3  # runs needed to reproduce an accuracy
IN_POINTS = ("%", "points")  # units whose tolerance is in points; in other units it is relative, in percent


class Criterion(NamedTuple):
    """Rule for judging measurements of a kind of evidence.

    Args:
    - `tolerance`: accepted difference from the published value: percentage points if its unit is % or points, otherwise
      percent of it.
    - `reason`: the reason for this tolerance.
    - `is_rounded`: whether a value that rounds or truncates to the printed digits is equal.
    - `repeats`: the unit of n; "deterministic" if every repetition gives the same value.
    - `spread`: meaning of the spread of a measurement.
    - `margin`: multiple of the spread; the verdict must be the same at the measured value plus and minus the margin.
    """

    tolerance: float
    reason: str
    is_rounded: bool = False
    repeats: str = "deterministic"
    spread: str = ""
    margin: float = 0.0


CRITERIA: dict[Evidence, Criterion] = {
    "count": Criterion(5, "within 5 %: the papers leave out the first and the last layer; follows from the algorithm"),
    "parameters": Criterion(
        1, "within 1 %, or equal as printed: the papers print two or three digits", is_rounded=True
    ),
    "memory predicted": Criterion(
        10, "within 10 %: counted without the scratch memory, which depends on the GPU; not measured on a GPU"
    ),
    "memory measured": Criterion(
        10, "within 10 %: peak of the CPU's allocator, of which the papers count the largest tensors only"
    ),
    "time measured": Criterion(
        1,
        "within 1 %, at both quartiles: the papers print whole percents",
        repeats="rounds",
        spread="interquartile range",
        margin=0.5,
    ),
    "signal-to-noise measured": Criterion(
        FACTOR,
        "within a factor of 2: read off logarithmic axes, of one random network each",
        repeats="random networks",
        spread="range",
    ),
    "accuracy scored": Criterion(
        0.1,
        "within 0.1 points: the same weights and images, resized by another library",
        spread="standard error",
    ),
    "accuracy trained": Criterion(
        0.5,
        f"within 0.5 points, at plus and minus two standard errors, of at least {MIN_RUNS} runs: trainings that differ "
        "in their seed alone do so too",
        repeats="trained networks",
        spread="standard error",
        margin=2.0,
    ),
}  # fmt: skip


class Verdict(NamedTuple):
    """The verdict on a published number.

    Args:
    - `state`: "reproduced": within the tolerance; "better" or "off": beyond it; "underpowered": too few images, runs or
      rounds for another verdict; "not measured".
    - `reason`: the difference, or why nothing was measured, such as the command that measures it.
    """

    state: State
    reason: str = ""

    def __str__(self) -> str:
        """Return "state: reason"."""
        return f"{self.state}: {self.reason}" if self.reason else self.state


@dataclass(frozen=True)
class Comparison:
    """One number of a table or figure: published value, measured value and verdict.

    Args:
    - `what`: name of the number.
    - `measured`: value in the unit of the published number; None if nothing was measured, with the reason in `pending`.
    - `published`: the published number.
    - `n`: number of runs or repetitions in the mean or median; 1 for a deterministic number.
    - `spread`: see `Criterion`, in the same unit; None if nothing varies or if it is unknown.
    - `weakness`: the reason why the measurement is too weak for a verdict, if it is.
    - `note`: further facts of the measurement.
    - `pending`: why nothing was measured, such as the command that measures it.
    - `environment`: environment of the training runs or the report that the number was read from; None if it was
      measured by this run.
    - `date`, `command`: date and command of the measurement, if they differ from the section's.
    """

    what: str
    measured: MeasuredValue
    published: PublishedNumber
    _: KW_ONLY
    n: int = 1
    spread: float | None = None
    weakness: str = ""
    note: str = ""
    pending: str = ""
    environment: Mapping[str, Any] | None = None
    date: str = ""
    command: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the measured number, by the criterion of the published number's evidence alone."""
        number, measured = self.published, self.measured
        if measured is None:
            return Verdict("not measured", self.pending)
        if isinstance(measured, str) or (isinstance(number.value, str) and not number.is_bounded):
            return Verdict("reproduced", "equal") if measured == number.value else Verdict("off", "another one")
        criterion, (low, high) = CRITERIA[number.evidence], accepted(number)
        margin = criterion.margin * (self.spread or 0.0)
        reason = _difference(number, measured)
        if self.weakness:
            return Verdict("underpowered", f"{self.weakness}; {reason}")
        is_within = low <= measured - margin and measured + margin <= high
        is_outside = measured + margin < low or measured - margin > high
        is_accuracy = number.evidence == "accuracy trained" and number.unit in IN_POINTS and not number.is_bounded
        if criterion.margin and self.spread is None:
            return Verdict("underpowered", f"{reason}, {criterion.spread} unknown")
        if is_within and is_accuracy and self.n < MIN_RUNS:
            return Verdict("underpowered", f"{reason}, {self.n} of {MIN_RUNS} runs")
        if is_within:
            return Verdict("reproduced", reason)
        if is_outside:
            return Verdict("better" if number.direction == ("less" if measured < low else "more") else "off", reason)
        return Verdict("underpowered", f"{reason}, {criterion.spread} {number_text(self.spread)}")


@dataclass
class ReportSection:
    """A section of a report: one table or figure of a paper.

    Args:
    - `key`: short name such as "table3", part of the file name of its plot.
    - `title`: the heading.
    - `comparisons`: the rows of its table.
    - `panels`: panels of its plot, if any.
    - `seconds`: duration of the measurement.
    - `command`, `environment`: the command that measured it, and where.
    """

    key: str
    title: str
    comparisons: list[Comparison] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    def add(self, what: str, measured: MeasuredValue, published: PublishedNumber, **facts: Any) -> None:
        """Add a `Comparison`."""
        self.comparisons.append(Comparison(what, measured, published, **facts))


def accepted(number: PublishedNumber) -> tuple[float, float]:
    """Return the smallest and the largest value that reproduces a number."""
    if number.is_bounded:
        return (-math.inf if number.at_least is None else number.at_least,
                math.inf if number.at_most is None else number.at_most)  # fmt: skip
    value, criterion = number.number, CRITERIA[number.evidence]
    if number.evidence == "signal-to-noise measured":
        return value / criterion.tolerance, value * criterion.tolerance
    width = criterion.tolerance if number.unit in IN_POINTS else abs(value) * criterion.tolerance / 100
    last_digit = 10.0 ** _exponent(number.value) if criterion.is_rounded else 0.0
    last_digit = last_digit if last_digit <= abs(value) * ROUNDED else 0.0
    low, high = max(width, last_digit / 2), max(width, last_digit * (1 - 1e-9))
    return value - low - 1e-9 * abs(value), value + high + 1e-9 * abs(value)


def _exponent(value: int | Decimal | str) -> int:
    """Return the decimal exponent of the last digit of a value."""
    exponent = Decimal(value or 0).as_tuple().exponent
    return exponent if isinstance(exponent, int) else 0


def _difference(number: PublishedNumber, measured: float) -> str:
    """Describe the distance of a measured value from the published one, or the bounds that it should be within."""
    if number.is_bounded:
        bounds = {"at least": number.at_least, "at most": number.at_most}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
    if number.evidence == "signal-to-noise measured":
        return f"a factor of {measured / number.number:.2g}"
    if number.unit in IN_POINTS:
        return f"{measured - number.number:+.2f} points"
    is_equal = math.isclose(measured, number.number, rel_tol=1e-9)
    return "equal" if is_equal else f"{100 * (measured / number.number - 1):+.1f} %"
