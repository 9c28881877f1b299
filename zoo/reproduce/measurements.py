"""The decorator that registers a function as the measurement of a table, figure or section of a paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from zoo.reproduce.comparison import ReportSection
from zoo.reproduce.published_numbers import published_numbers

Given = Literal["", "runs", "scores"]
Function = TypeVar("Function", bound=Callable[..., ReportSection])


class Measurement(NamedTuple):
    """The measurement of an item of a paper, or of a part of it; see `measures`."""

    paper: str
    item: str
    function: Callable[..., ReportSection]
    given: Given


_MEASUREMENTS: list[Measurement] = []


def measures(paper: str, item: str, given: Given = "") -> Callable[[Function], Function]:
    """Decorator that registers a function as a measurement. The function returns the section of a report.

    Args:
    - `paper`: name of the paper, such as "revnet".
    - `item`: name of the table, figure or section in the paper, such as "Table 1".
    - `given`: the argument of the function, if any: "runs", the training runs of the paper's experiments, or "scores",
      the rows of imagenet.json, which `zoo reproduce imagenet` writes.
    """

    def register(function: Function) -> Function:
        _MEASUREMENTS.append(Measurement(paper, item, function, given))
        return function

    return register


def measurements_of(paper: str) -> list[Measurement]:
    """Return the measurements of a paper, in the order of its published numbers."""
    order = list(dict.fromkeys(number.item for number in published_numbers(paper).values()))
    return sorted((each for each in _MEASUREMENTS if each.paper == paper), key=lambda each: order.index(each.item))
