"""Descriptions of the settings of an experiment: types, defaults, bounds and meanings, from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from zoo.config.architectures import Architecture
from zoo.config.experiment import Experiment
from zoo.config.optimizer import OPTIMIZER_PARAMS
from zoo.config.schedule import SCHEDULE_PARAMS
from zoo.config.section import Section, inner_section, settings_of
from zoo.errors import join_names

_TYPE_NAMES = {
    "integer": "whole number",
    "boolean": "true or false",
    "null": "null",
    "object": "object",
    "string": "text",
}


class Setting(NamedTuple):
    """Description of a setting: its dotted ``name``, the last ``key`` of the name, and its values.

    ``default`` is JSON, or "required". ``bounds`` is empty if the type implies them. ``aliases`` are the keys of the
    original project's files.
    """

    name: str
    key: str
    type: str
    default: str
    bounds: str
    meaning: str
    aliases: tuple[str, ...] = ()

    def facts(self) -> list[str]:
        """Return the type, the bounds if any, and the default."""
        default = "required" if self.default == "required" else f"default {self.default}"
        return [self.type, *([self.bounds] if self.bounds else ()), default]


class SectionText(NamedTuple):
    """Description of a section of an experiment file: its dotted path, its meaning and its settings."""

    path: str
    meaning: str
    settings: list[Setting]


def describe_settings(pattern: str = "*") -> list[SectionText]:
    """Return the sections of an experiment file: the top level first, the parameters that depend on a type last.

    Includes settings whose dotted name contains ``pattern`` or matches it, shell-style, and sections that have any.
    """
    sections = list(_walk(Experiment, ""))
    for path, key, kinds in (
        ("optimizer.params", "type", OPTIMIZER_PARAMS),
        ("optimizer.schedule.params", "type", SCHEDULE_PARAMS),
    ):
        for params in dict.fromkeys(kinds.values()):
            types = join_names([f'"{kind}"' for kind in kinds if kinds[kind] is params])
            sections.append(_describe(params, path)._replace(path=f"{path} with {key} {types}"))
    matching = [
        section._replace(settings=[each for each in section.settings if _matches(each, pattern)])
        for section in sections
    ]
    return [section for section in matching if section.settings]


def _matches(setting: Setting, pattern: str) -> bool:
    names = setting.name, *setting.aliases
    return any(pattern in name or fnmatchcase(name, pattern) for name in names)


def describe_options(arch: Architecture) -> dict[str, str]:
    """Return the meaning of each option of an architecture with its values and default, and its memory strategies."""
    settings = _describe(arch.options, "").settings
    meanings = {
        setting.key: f"{setting.meaning.removesuffix('.')} ({'; '.join(setting.facts())})" for setting in settings
    }
    memory = f"What is saved for backward, which changes neither weights nor results: {', '.join(arch.memory)}"
    return {**meanings, "memory": f'{memory} (default "auto")'}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of nested settings, such as ``optimizer.learning_rate``; lists are values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _walk(section: type[BaseModel], path: str) -> Iterator[SectionText]:
    yield _describe(section, path)
    for key, field in settings_of(section).items():
        inner = _fixed_section(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{path}.{key}".removeprefix("."))


def _fixed_section(annotation: Any) -> type[Section] | None:
    """Return the section of an annotation; None for parameters whose section depends on a type."""
    section = inner_section(annotation)
    return section if section is not None and section.model_fields else None


def _is_section(annotation: Any) -> bool:
    """Return whether a value is always a section, or one of several."""
    kinds = get_args(annotation) or (annotation,)
    return all(_fixed_section(kind) is kind for kind in kinds)


def _describe(section: type[BaseModel], path: str) -> SectionText:
    """Return the description of a section; ``path`` is empty for the top level of the file."""
    schema = section.model_json_schema()
    required = schema.get("required", ())
    settings = []
    for key, about in schema["properties"].items():
        field = section.model_fields[key]
        if _is_section(field.annotation):
            continue
        default = (
            "required"
            if key in required
            else json.dumps(field.get_default(call_default_factory=True, validated_data={}))
        )
        meaning = " ".join(about.get("description", "").split())
        bounds = ", ".join(dict.fromkeys(_bounds(about)))
        aliases = getattr(field.validation_alias, "choices", ())
        others = tuple(str(alias) for alias in aliases if alias != key)
        name = f"{path}.{key}".removeprefix(".")
        settings.append(Setting(name, key, _type(about), default, bounds, meaning, others))
    return SectionText(path or "the top level", (section.__doc__ or "").partition("\n")[0].replace("``", ""), settings)


def _type(about: dict[str, Any]) -> str:
    if "anyOf" in about:
        return " or ".join(dict.fromkeys(_type(choice) for choice in about["anyOf"]))
    if "enum" in about:
        return ", ".join(json.dumps(word) for word in about["enum"])
    if about.get("type") == "array":
        length = f"{about['minItems']} " if about.get("minItems") == about.get("maxItems", 0) else ""
        return f"list of {length}{_plural(_type(about['items']))}"
    return _TYPE_NAMES.get(about.get("type", "object"), "number")


def _plural(words: str) -> str:
    return words.replace("numbers", "number").replace("number", "numbers").replace("list of", "lists of")


def _bounds(about: dict[str, Any]) -> Iterator[str]:
    """Yield the bounds of a number, or of the numbers in a list."""
    for inner in (*about.get("anyOf", ()), *([about["items"]] if "items" in about else ())):
        yield from _bounds(inner)
    for limit, words in (
        ("exclusiveMinimum", "more than"),
        ("minimum", "at least"),
        ("exclusiveMaximum", "less than"),
        ("maximum", "at most"),
    ):
        if limit in about:
            number = about[limit]
            yield f"{words} {int(number) if number == int(number) and abs(number) < 1e12 else number:,}"
