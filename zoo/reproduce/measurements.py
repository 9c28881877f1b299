"""The decorator that makes a function the measurement of a table, figure or section of a paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from zoo.reproduce.comparison import Section
from zoo.reproduce.published_numbers import published_numbers
from zoo.reproduce.training_runs import TrainingRun

Function = TypeVar("Function", bound=Callable[..., Section])


class Inputs(NamedTuple):
    """What was measured elsewhere.

    Args:
    - `runs`: training runs of the papers' experiments.
    - `scores`: rows of imagenet.json, which `zoo reproduce imagenet` writes.
    """

    runs: Sequence[TrainingRun] = ()
    scores: Sequence[Mapping[str, Any]] = ()


class Measurement(NamedTuple):
    """The measurement of an item of a paper, or of a part of it; see `measures`."""

    paper: str
    item: str
    function: Callable[..., Section]
    given: Literal["", "runs", "scores"]

    def measure(self, inputs: Inputs) -> Section:
        """Return the section of the report."""
        return self.function(*([getattr(inputs, self.given)] if self.given else []))


_MEASUREMENTS: list[Measurement] = []


def measures(paper: str, item: str, given: Literal["", "runs", "scores"] = "") -> Callable[[Function], Function]:
    """Return a decorator for a function that returns the section of a report.

    Args:
    - `paper`: name of the paper, such as "revnet".
    - `item`: name of the table, figure or section in the paper, such as "Table 1".
    - `given`: the argument of the function, if any: one of the `Inputs`.
    """

    def register(function: Function) -> Function:
        _MEASUREMENTS.append(Measurement(paper, item, function, given))
        return function

    return register


def measurements_of(paper: str) -> list[Measurement]:
    """Return the measurements of a paper, in the order of its published numbers."""
    order = list(dict.fromkeys(number.item for number in published_numbers(paper).values()))
    return sorted((each for each in _MEASUREMENTS if each.paper == paper), key=lambda each: order.index(each.item))
