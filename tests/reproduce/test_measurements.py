"""Each table, figure and section with a published number has a measurement, and the report has them in its order."""

from __future__ import annotations

import pytest

from zoo.reproduce.measurements import measurements_of
from zoo.reproduce.papers import PAPERS
from zoo.reproduce.published_numbers import published_numbers

MEASURED_WITH_OTHERS = {
    "inplace_abn": {"Section 1", "Section 5"},
    "revnet": {"Section 7.1"},
    "revnext": {"Section 3.4", "Section 4.3"},
}


@pytest.mark.parametrize("paper", PAPERS)
def test_measurement_is_named_after_item_of_its_numbers(paper: str) -> None:
    items = list(dict.fromkeys(number.item for number in published_numbers(paper).values()))
    found = dict.fromkeys(each.item for each in measurements_of(paper))
    assert list(found) == [item for item in items if item not in MEASURED_WITH_OTHERS[paper]]
