"""Builds sections from JSON schemas. The index of networks stores a schema for the options of each family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from zoo.config.section import Section

TYPES = {"integer": int, "number": float, "boolean": bool, "string": str}
# Keywords of JSON schema -> arguments of pydantic's `Field`.
BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
    "minItems": "min_length",
    "maxItems": "max_length",
}


class ShouldBe:
    """Annotation of a setting with several types: gives one message instead of one per type."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                return validate(value)
            except ValidationError:
                raise ValueError(f"should be {self.words}") from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "errorMessage": self.words}


class _FromSchema(Section):
    model_config = ConfigDict(use_attribute_docstrings=False)  # the schema has the descriptions


def section_of(schema: Mapping[str, Any]) -> type[Section]:
    """Return the section whose ``model_json_schema()`` is ``schema``.

    Its settings are numbers, booleans, text, choices, lists and unions of these, with bounds and a default.
    """
    fields: dict[str, Any] = {
        key: (_annotation(about), Field(default=about["default"], description=about["description"]))
        for key, about in schema["properties"].items()
    }
    return create_model(schema["title"], __base__=_FromSchema, __doc__=schema["description"], **fields)


def _annotation(about: Mapping[str, Any]) -> Any:
    if about.get("type") == "null":
        return None
    bounds = {argument: about[keyword] for keyword, argument in BOUNDS.items() if keyword in about}
    words = [ShouldBe(about["errorMessage"])] if "errorMessage" in about else []
    return Annotated[(_type(about), Field(**bounds), *words)]


def _type(about: Mapping[str, Any]) -> Any:
    if "anyOf" in about:
        return Union[tuple(map(_annotation, about["anyOf"]))]  # noqa: UP007  # of a variable number of types
    if "enum" in about:
        return Literal[tuple(about["enum"])]
    if "const" in about:
        return Literal[about["const"]]
    if about["type"] == "array":
        return list[_annotation(about["items"])]  # type: ignore[misc]
    return TYPES[about["type"]]
