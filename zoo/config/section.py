"""The base class for everything that is read from JSON: sections of experiment files, descriptions of networks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from zoo.errors import ConfigError, ZooError, escape, truncate

KeyPath = tuple[str | int, ...]
MAX_VALUE_CHARS = 80
MAX_PROBLEMS = 20  # a message lists so many problems and counts the others
MAX_NESTING = 16  # an experiment has five levels
MAX_VALUES = 10_000  # an experiment has some sixty

MISSING = object()  # the value of a key that is missing


def dotted(path: KeyPath) -> str:
    """Return a key path as text, such as ``input.mean[1]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{truncate(part)}" for part in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Problem:
    """One fault of a description: its key path, the value, and a message."""

    path: KeyPath
    value: Any
    message: str

    def __str__(self) -> str:
        if self.value is MISSING or isinstance(self.value, Section):
            return f"{dotted(self.path)}: {self.message}"
        try:
            value = json.dumps(self.value, default=_to_json)
        except TypeError:  # a checkpoint's settings may have keys that JSON does not allow
            value = escape(self.value)
        except (ValueError, RecursionError):  # a number of thousands of digits, or a dict that contains itself
            value = f"(a {type(self.value).__name__} too long to show)"
        if len(value) > MAX_VALUE_CHARS:
            value = value[: MAX_VALUE_CHARS - 3] + "..."
        return f"{dotted(self.path)} = {value}: {self.message}"


def _to_json(value: Any) -> Any:
    """Return a JSON-compatible substitute for ``value``, for messages."""
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else repr(value)


class Conflicts(ValueError):
    """Raised by a section whose values are valid individually but contradict each other; ``problems`` lists them."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _SectionType(ModelMetaclass):
    """Makes ``Section(key=value)`` raise ConfigError. pydantic itself validates without this call."""

    def __call__(cls: Any, **settings: Any) -> Any:
        try:
            return super().__call__(**settings)
        except ValidationError as caught:
            problems = [_with_nearest_key(problem, cls.model_fields) for problem in problems_of(caught)]
        raise_problems(problems, cls.__name__)


def _with_nearest_key(problem: Problem, keys: Iterable[str]) -> Problem:
    """Return the problem; for an unknown key, add the key with a similar name, if there is one."""
    near = difflib.get_close_matches(str(problem.path[-1]), list(keys), n=1) if problem.path else []
    if problem.message != UNKNOWN_KEY or not near:
        return problem
    return replace(problem, message=f"{UNKNOWN_KEY}; the nearest is {near[0]}")


class Section(BaseModel, metaclass=_SectionType):
    """A group of settings: no unknown keys, exact types (whole numbers pass as floats), finite numbers.

    Sections are immutable, so that a digest stays valid. The text below a setting is its description, which
    `zoo settings` prints.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    classification_only: ClassVar[tuple[str, ...]] = ()
    """Settings that segmentation does not use."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield ``(key, message)`` for each impossible combination; keys of inner sections are dotted."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Section:
        problems = [Problem(tuple(key.split(".")), attrgetter(key)(self), message) for key, message in self.conflicts()]
        if problems:
            raise Conflicts(problems)
        return self


AnySection = TypeVar("AnySection", bound=Section)


def parse_section(
    section: type[AnySection],
    content: Mapping[str, Any],
    source: str,
    path: KeyPath = (),
    error: type[ZooError] = ConfigError,
) -> AnySection:
    """Parse ``content`` into a section.

    ``source`` and ``path`` name the content in messages. Raises ``error``, with one line per problem.
    """
    try:
        return section.model_validate(dict(content))
    except ValidationError as caught:
        problems = [replace(each, path=path + each.path) for each in problems_of(caught)]
    raise_problems(problems, source, error)


def raise_problems(problems: list[Problem], source: str, error: type[ZooError] = ConfigError) -> NoReturn:
    """Raise ``error`` with a line for each of the first `MAX_PROBLEMS` problems."""
    lines = [f"{source}: {problem}" for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"{source}: and {len(problems) - MAX_PROBLEMS:,} more problems")
    raise error("\n".join(lines))


def problems_of(error: ValidationError) -> Iterator[Problem]:
    """Yield the problems that pydantic found, with paths below the section that was validated."""
    for details in error.errors():
        # pydantic marks the path of a wrong key with "[key]".
        path = tuple(part for part in details["loc"] if part != "[key]")
        if details["type"] == "default_factory_not_called":  # follows from another problem
            continue
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Conflicts):
            for problem in cause.problems:
                yield replace(problem, path=path + problem.path)
        elif details["type"] == "missing":
            yield Problem(path, MISSING, "is missing")
        elif details["type"] == "extra_forbidden":
            yield Problem(path, details["input"], UNKNOWN_KEY)
        elif details["type"] in ("model_type", "dict_type"):
            yield Problem(path, details["input"], "should be a JSON object")
        else:
            message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
            yield Problem(path, details["input"], message[0].lower() + message[1:])


UNKNOWN_KEY = "unknown key"


def check_extent(content: Mapping[str, Any], source: str, error: type[ZooError] = ConfigError) -> None:
    """Raise ``error`` for content that is too large or nested too deeply, such as a list that contains itself.

    Call it before any recursive function. A value that several places refer to, as is possible in a checkpoint, counts
    once for each place.
    """
    pending: list[tuple[KeyPath, Any]] = [((), content)]
    count = 0
    while pending:
        path, node = pending.pop()
        if not isinstance(node, (dict, list, tuple)):
            continue
        where = dotted(path[:3]) or "the whole"
        if len(path) > MAX_NESTING:
            raise error(f"{source}: {where}: is nested deeper than {MAX_NESTING} levels; an experiment has five")
        count += len(node)
        if count > MAX_VALUES:
            raise error(f"{source}: {where}: holds more than {MAX_VALUES:,} values; an experiment has some sixty")
        children = node.items() if isinstance(node, dict) else enumerate(node)
        pending += [((*path, key), child) for key, child in children]


def settings_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section that a user may set: all fields not marked `SkipJsonSchema`."""
    return {key: section.model_fields[key] for key in section.model_json_schema().get("properties", ())}


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section type in an annotation: directly, optional, or as the values of a dict; None if none."""
    kinds = (annotation, *get_args(annotation))  # Input, Expected | None, dict[Protocol, Score]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
