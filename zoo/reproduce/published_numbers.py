"""Numbers published by the papers and their authors, read from published/PAPER.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PUBLISHED_DIR = Path(__file__).parent / "published"
Kind = Literal["printed", "derived", "authors' log", "read off a figure"]


class PublishedNumber(BaseModel):
    """A number or statement of a paper or its authors.

    Args:
    - `item`: table, figure or section of the paper, such as "Table 3".
    - `quantity`: the measured quantity, such as "ResNet-32, CIFAR-10: test error".
    - `value`: the number in `unit`, or a statement instead of a number, such as "rises".
    - `unit`: "" for a number without a unit.
    - `kind`: "printed" in the paper; "derived" from printed numbers; "authors' log": output stored in the authors'
      public code; "read off a figure": estimated from a plot.
    - `quotation`: the printed words or table row, the numbers that a value is derived from, the line of the log, or a
      description of the figure.
    - `place`: location of the quotation, such as "Table 3, row ResNet-32" or "authors' notebook 4, cell 6".
    - `network`: network or experiment of this package; "" for none.
    - `settings`: further conditions, such as data set, batch and image size.
    - `id`: "PAPER/KEY", file name and key of the number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    item: Annotated[str, Field(min_length=1)]
    quantity: Annotated[str, Field(min_length=1)]
    value: int | float | str
    unit: str = ""
    kind: Kind
    quotation: Annotated[str, Field(min_length=1)]
    place: Annotated[str, Field(min_length=1)]
    network: str = ""
    settings: str = ""
    id: str = ""

    @model_validator(mode="after")
    def _check_id(self) -> PublishedNumber:
        if not self.id:
            raise ValueError("a number has no id; published_numbers() adds it")
        return self

    @property
    def number(self) -> float:
        """The value as a float; raises ValueError for a statement."""
        return float(self.value)

    @property
    def paper(self) -> str:
        """Name of the paper, such as "revnet"."""
        return self.id.partition("/")[0]


@cache
def published_numbers(paper: str) -> dict[str, PublishedNumber]:
    """Return the numbers of a paper ("inplace_abn", "revnet", "revnext") by their keys, in the paper's order."""
    content = json.loads((PUBLISHED_DIR / f"{paper}.json").read_text(encoding="utf-8"))
    return {key: PublishedNumber(**number, id=f"{paper}/{key}") for key, number in content.items()}


def published(paper: str, key: str) -> PublishedNumber:
    """Return one number of a paper; raises KeyError for an unknown key."""
    return published_numbers(paper)[key]
