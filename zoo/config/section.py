"""The base of every section of an experiment file, and the problems that a section can report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from zoo.errors import printable

KeyPath = tuple[str | int, ...]
MAX_VALUE_CHARS = 80

ABSENT = object()  # the value of a key that is missing


def dotted(path: KeyPath) -> str:
    """Return ``path`` as it is written in messages, for instance ``input.mean[1]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in an experiment: where, with which value, and what to do about it.

    ``involved`` lists the other keys that take part in the problem.
    """

    path: KeyPath
    value: Any
    message: str
    involved: tuple[KeyPath, ...] = ()

    def __str__(self) -> str:
        if self.value is ABSENT:
            return f"{dotted(self.path)}: {self.message}"
        try:
            value = json.dumps(self.value, default=repr)
        except TypeError:  # a checkpoint's settings may have keys that JSON does not allow
            value = printable(self.value)
        if len(value) > MAX_VALUE_CHARS:
            value = value[: MAX_VALUE_CHARS - 3] + "..."
        return f"{dotted(self.path)} = {value}: {self.message}"


class Conflicts(ValueError):
    """Raised by a section whose values are valid one by one but impossible together; ``problems`` lists them."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class Section(BaseModel):
    """A group of settings: no unknown keys, exact types (whole numbers pass as floats), finite numbers.

    Sections cannot be changed once they are built, so that a digest stays true.  The text below a setting is its
    description, which `zoo show --schema` prints.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield ``(keys, message)`` for each impossible combination; the message is shown with the first key."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Section:
        problems = [
            Problem((keys[0],), getattr(self, keys[0]), message, tuple((key,) for key in keys[1:]))
            for keys, message in self.conflicts()
        ]
        if problems:
            raise Conflicts(problems)
        return self
