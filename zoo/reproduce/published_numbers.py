"""Numbers published by the papers and their authors, read from published/PAPER.json."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from zoo.tables import number_text

PUBLISHED_DIR = Path(__file__).parent / "published"
Kind = Literal["printed", "derived", "authors' log", "read off a figure"]
Evidence = Literal[
    "count", "parameters", "memory predicted", "memory measured", "time measured",
    "signal-to-noise measured", "accuracy scored", "accuracy trained",
]  # fmt: skip
Direction = Literal["less", "more", "neither"]
# Kind of evidence -> the better direction. A number may override it.
BETTER: dict[Evidence, Direction] = {
    "memory predicted": "less", "memory measured": "less", "time measured": "less", "signal-to-noise measured": "more",
}  # fmt: skip


class PublishedNumber(BaseModel):
    """A number or statement of a paper or its authors.

    Args:
    - `item`: table, figure or section of the paper, such as "Table 3".
    - `quantity`: the measured quantity, such as "ResNet-32, CIFAR-10: test error".
    - `value`: the number in `unit` with the printed digits, or the words of a figure or a table, such as "O(L)".
    - `unit`: "" for a number without a unit.
    - `kind`: "printed" in the paper; "derived" from printed numbers; "authors' log": output stored in the authors'
      public code; "read off a figure": estimated from a plot.
    - `quotation`: the printed words or table row, the numbers that a value is derived from, the line of the log, or a
      description of the figure.
    - `place`: location of the quotation, such as "Table 3, row ResNet-32" or "authors' notebook 4, cell 6".
    - `evidence`: kind of evidence that a measurement of this number is. It sets the tolerance, see
      `zoo.reproduce.comparison.CRITERIA`.
    - `at_least`, `at_most`: bounds of the measured value, for a statement or for a published bound or range.
    - `better`: direction in which a measured value is better than published; by default as in `BETTER`.
    - `network`: network or experiment of this package; "" for none.
    - `settings`: further conditions, such as data set, batch and image size.
    - `finding`: what our measurements showed about this number.
    - `id`: "PAPER/KEY", file name and key of the number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    item: Annotated[str, Field(min_length=1)]
    quantity: Annotated[str, Field(min_length=1)]
    value: int | Decimal | str
    unit: str = ""
    kind: Kind
    quotation: Annotated[str, Field(min_length=1)]
    place: Annotated[str, Field(min_length=1)]
    evidence: Evidence
    at_least: float | None = None
    at_most: float | None = None
    better: Direction | None = None
    network: str = ""
    settings: str = ""
    finding: str = ""
    id: Annotated[str, Field(min_length=1)]

    @property
    def number(self) -> float:
        """The value as a float; raises ValueError for a statement."""
        return float(self.value or 0)

    @property
    def text(self) -> str:
        """The value with its printed digits; very large and small numbers have an exponent."""
        if isinstance(self.value, Decimal) and 1e-3 <= abs(self.value) < 1e4:
            return str(self.value)
        return number_text(float(self.value) if isinstance(self.value, Decimal) else self.value)

    @property
    def is_bounded(self) -> bool:
        """Whether the measured value must be within bounds instead of near the published value."""
        return self.at_least is not None or self.at_most is not None

    @property
    def direction(self) -> Direction | None:
        """The better direction, if any."""
        return self.better or BETTER.get(self.evidence)

    @property
    def paper(self) -> str:
        """Name of the paper, such as "revnet"."""
        return self.id.partition("/")[0]


@cache
def published_numbers(paper: str) -> dict[str, PublishedNumber]:
    """Return the numbers of a paper ("inplace_abn", "revnet", "revnext") by their keys, in the paper's order."""
    text = (PUBLISHED_DIR / f"{paper}.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_float=Decimal)  # keeps trailing zeros
    return {key: PublishedNumber(**number, id=f"{paper}/{key}") for key, number in content.items()}


def published_number(paper: str, key: str) -> PublishedNumber:
    """Return one number of a paper; raises KeyError for an unknown key."""
    return published_numbers(paper)[key]
