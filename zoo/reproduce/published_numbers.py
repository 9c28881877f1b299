"""Reads the numbers that the papers and their authors publish from published/PAPER.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FOLDER = Path(__file__).parent / "published"
Kind = Literal["printed", "derived", "authors' log", "read off a figure"]


class PublishedNumber(BaseModel):
    """A number or statement of a paper or its authors.

    Args:
    - `item`: the table, figure or section that it belongs to, such as "Table 3".
    - `quantity`: what it measures, of which network, such as "ResNet-32, CIFAR-10: test error".
    - `value`: the number in `unit`, or the words that stand in its place ("rises").
    - `unit`: "" for a number without one.
    - `kind`: "printed" in the text or a table of the paper; "derived" from what is printed; "authors' log" for an
      output that the authors' public code has kept; "read off a figure", which is only as exact as the eye.
    - `quotation`: the words or the row of the table that hold a printed value; what a derived one is derived from; what
      the log prints; what is seen in the figure.
    - `place`: where the quotation is found, such as "Table 3, row ResNet-32" or "authors' notebook 4, cell 6".
    - `network`: the network or the experiment of this package that it belongs to; "" where it belongs to none.
    - `settings`: what else the number belongs to, such as the data, the batch and the size of the images.
    - `id`: "PAPER/KEY", the name of the file and the key of the number in it.
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
    def _is_known_by_its_file(self) -> PublishedNumber:
        if not self.id:
            raise ValueError("a number is given its id by the file that it is read from")
        return self

    @property
    def number(self) -> float:
        """The value, which is a number; ValueError for words."""
        return float(self.value)

    @property
    def paper(self) -> str:
        """The name of the paper's file."""
        return self.id.partition("/")[0]


@cache
def published_numbers(paper: str) -> dict[str, PublishedNumber]:
    """Return the numbers of a paper ("inplace_abn", "revnet", "revnext") by their keys, in the paper's order."""
    content = json.loads((FOLDER / f"{paper}.json").read_text(encoding="utf-8"))
    return {key: PublishedNumber(**number, id=f"{paper}/{key}") for key, number in content.items()}


def published(paper: str, key: str) -> PublishedNumber:
    """Return one number of a paper; raises KeyError for an unknown key."""
    return published_numbers(paper)[key]
