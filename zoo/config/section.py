"""The base of every section of an experiment file, and the problems that a section can report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_args

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
        if self.value is ABSENT or isinstance(self.value, Section):
            return f"{dotted(self.path)}: {self.message}"
        try:
            value = json.dumps(self.value, default=_plain)
        except TypeError:  # a checkpoint's settings may have keys that JSON does not allow
            value = printable(self.value)
        if len(value) > MAX_VALUE_CHARS:
            value = value[: MAX_VALUE_CHARS - 3] + "..."
        return f"{dotted(self.path)} = {value}: {self.message}"


def _plain(value: Any) -> Any:
    """Return what stands for ``value``, which JSON does not know, in a message."""
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else repr(value)


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
        """Yield ``(keys, message)`` for each impossible combination; the message is shown with the first key.

        A key of an inner section is dotted, as ``input.crop_val``.
        """
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Section:
        problems = [
            Problem(paths[0], attrgetter(keys[0])(self), message, paths[1:])
            for keys, message in self.conflicts()
            for paths in [tuple(tuple(key.split(".")) for key in keys)]
        ]
        if problems:
            raise Conflicts(problems)
        return self


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section that a field annotated so holds, by itself, or none of it, or several; None if it has none."""
    kinds = (annotation, *get_args(annotation))  # Input, Expected | None, dict[Protocol, Score]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
