"""The parts of a reproduced table or figure, and the verdicts on its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from zoo.reproduce.published_numbers import PublishedNumber
from zoo.run.plot_style import Panel

Value = float | str | None
State = Literal[
    "reproduced", "off", "underpowered", "needs data", "needs training", "not built", "not run", "nothing published"
]


class Verdict(NamedTuple):
    """The verdict on a measured number.

    Args:
    - `state`: "reproduced"; "off"; "underpowered": too few images or runs for a verdict; "needs data" or "needs
      training": a command measures it, given a data set or a training run; "not built": this package cannot measure it;
      "not run": a command measures it, but has not been run; "nothing published": the paper has no such number.
    - `reason`: the difference, the command, or the reason why there is none.
    """

    state: State
    reason: str = ""

    def __str__(self) -> str:
        """Return "state: reason"."""
        if not self.reason or self.reason.startswith(self.state):
            return self.reason or self.state
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True)
class Comparison:
    """One number of a table or figure: published value, measured value and verdict.

    Args:
    - `what`: name of the number.
    - `published`: None if nothing was published.
    - `measured`: None if nothing was measured; the verdict then gives the reason.
    - `unit`: unit of both numbers.
    - `verdict`: the difference between the measured and the published number.
    - `n`: number of runs or repetitions in the mean or median; 1 for a deterministic number.
    - `spread`: standard error of a mean accuracy, or interquartile range of times, in the same unit; None if nothing
      varies or if it is unknown.
    - `weights_md5`: digest of the weights that were scored, if any.
    - `data`: fingerprint of the images that were scored, if any.
    - `environment`: environment of the training runs or the report that the number was read from; None if it was
      measured by this run.
    - `date`, `command`: date and command of the measurement, if the number was read from a report that records them.
    """

    what: str
    published: PublishedNumber | None
    measured: Value
    unit: str
    verdict: Verdict
    n: int = 1
    spread: float | None = None
    weights_md5: str = ""
    data: str = ""
    environment: Mapping[str, Any] | None = None
    date: str = ""
    command: str = ""


@dataclass
class Section:
    """A section of a report: one table or figure of a paper.

    Args:
    - `key`: short name such as "table3", part of the file name of its plot.
    - `title`: the heading.
    - `setting`: description of the measurement.
    - `comparisons`: the rows of its table.
    - `notes`: remarks on the comparisons.
    - `panels`: panels of its plot, if any.
    - `seconds`: duration of the measurement.
    """

    key: str
    title: str
    setting: str
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    seconds: float = 0.0


def compare(what: str, published: PublishedNumber, measured: float, unit: str, tolerance: float) -> Comparison:
    """Return the comparison of two numbers by their relative difference; ``tolerance`` is relative too."""
    return Comparison(what, published, measured, unit, within(measured / published.number - 1, tolerance))


def within(difference: float, tolerance: float) -> Verdict:
    """Return the verdict on a relative difference."""
    if abs(difference) <= tolerance:
        return Verdict("reproduced", f"within {100 * tolerance:g} %" if tolerance else "equal")
    return off_by(difference)


def off_by(difference: float) -> Verdict:
    """Return the verdict on a relative difference that is too large."""
    return Verdict("off", f"off by {100 * difference:+.1f} %")


def compare_decades(what: str, published: PublishedNumber, measured: float) -> Comparison:
    """Return the comparison of numbers that span decades: a factor of at most 2 counts as reproduced."""
    factor = measured / published.number
    if 0.5 <= factor <= 2:
        verdict = Verdict("reproduced", "within a factor of 2")
    else:
        verdict = Verdict("off", f"off by a factor of {factor:.2g}")
    return Comparison(what, published, measured, "", verdict)


def compare_minimum(what: str, published: PublishedNumber, measured: float, unit: str) -> Comparison:
    """Return the comparison of a ratio that should be at least as large as the published one."""
    difference = measured / published.number - 1
    verdict = Verdict("reproduced", "at least as large") if difference >= 0 else off_by(difference)
    return Comparison(what, published, measured, unit, verdict)


def compare_maximum(what: str, published: PublishedNumber, measured: float, unit: str, tolerance: float) -> Comparison:
    """Return the comparison of an amount of memory that should be at most the published one; less is not off."""
    difference = measured / published.number - 1
    verdict = within(difference, tolerance)
    if difference < -tolerance:
        verdict = Verdict("reproduced", f"less by {-100 * difference:.1f} %")
    return Comparison(what, published, measured, unit, verdict)


def explain(comparison: Comparison, why: str) -> Comparison:
    """Return the comparison with ``why`` appended to the reason of its verdict."""
    verdict = comparison.verdict
    reason = f"{verdict.reason}; {why}" if verdict.reason else why
    return replace(comparison, verdict=verdict._replace(reason=reason))


def unpublished(what: str, measured: Value, unit: str = "") -> Comparison:
    """Return the comparison of a measured number that the paper does not publish."""
    return Comparison(what, None, measured, unit, Verdict("nothing published"))


def not_measured(what: str, published: PublishedNumber | None, unit: str, verdict: Verdict) -> Comparison:
    """Return the comparison of a number that was not measured; the verdict says why."""
    return Comparison(what, published, None, unit, verdict)
