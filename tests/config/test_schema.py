"""A section that is read from its JSON schema accepts the same values and reports the same problems."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from zoo.config.schema import ShouldBe, section_of
from zoo.config.section import Section
from zoo.errors import ConfigError

Rate = Annotated[float, Field(gt=0, lt=1)]


class _Options(Section):
    """Options of all kinds."""

    count: Annotated[int, Field(ge=2, le=8, multiple_of=2)] = 4
    """An even number."""
    rate: Rate | None = None
    """A rate, or nothing."""
    flag: bool = False
    """A truth value."""
    kind: Literal["a", "b"] = "a"
    """A choice."""
    only: Literal[3] = 3
    """One choice."""
    rates: Annotated[list[Rate], Field(min_length=1, max_length=2)] = Field(default=[0.5])
    """One or two rates."""
    either: Annotated[bool | int | list[int | list[int]], ShouldBe("a truth value, a number, or lists of these")] = 1
    """Several types."""
    maybe: Annotated[int | list[int], ShouldBe("a number or a list")] | None = None
    """Several types, or nothing."""


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, 7, 10, 0.0, 0.5, 1.0, float("nan"), "a", "c", "1"),
    *([], [0.5], [0.5, 0.5], [0.1] * 3, [1], [True], [[1]], [[1, "a"]], [1, [2]], {}, (1,)),
]


def _result(section: type[Section], **settings: Any) -> object:
    try:
        return section(**settings).model_dump()
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("key", _Options.model_fields)
def test_values_and_messages_are_same(key: str) -> None:
    copied = section_of(_Options.model_json_schema())
    for value in VALUES:
        assert _result(copied, **{key: value}) == _result(_Options, **{key: value}), value


def test_defaults_and_unknown_keys_are_same() -> None:
    copied = section_of(_Options.model_json_schema())
    assert copied.model_json_schema() == _Options.model_json_schema()
    assert _result(copied) == _result(_Options)
    assert _result(copied, counts=1) == _result(_Options, counts=1)
    assert copied().rates is not copied().rates
