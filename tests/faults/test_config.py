"""Invalid settings and arguments raise an error of one sentence that names them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.parse import load_experiment, parse_experiment
from zoo.errors import ConfigError


def nested(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for _ in range(depth):
        content = {"options": content}
    return content


@pytest.mark.parametrize("depth", [20, 450, 900, 5_000])
def test_deep_nesting_raises(depth, tmp_path) -> None:
    for content in ({"network": nested(depth)}, {"network": {"options": {"blocks": nested(depth)}}}):
        refused(ConfigError, partial(parse_experiment, content, "x.json"), "x.json: ", "nested")
    path = tmp_path / "x.json"
    path.write_text('{"network": ' * depth + "1" + "}" * depth)
    refused(ConfigError, lambda: load_experiment(path), f"{path}: ")


def test_repeated_value_in_many_places_raises() -> None:
    value: list[Any] = [1]
    for _ in range(10):
        value = [value] * 8
    content = {"network": {"options": {"blocks": value}}}
    refused(ConfigError, lambda: parse_experiment(content, "c.pth.tar"), "c.pth.tar: ", "10,000")


def test_many_unknown_keys_give_short_message() -> None:
    content = {f"key{index}\x1b[31m": 1 for index in range(2000)}
    message = refused(ConfigError, lambda: parse_experiment(content, "x.json"), "1,980 more")
    assert len(message) < 10_000
    assert "\x1b" not in message
    many = {f"key{index}": 1 for index in range(100_000)}
    refused(ConfigError, lambda: parse_experiment(many, "x.json"), "10,000")


def numbers(section: Any = Experiment, path: str = "") -> list[tuple[str, Any]]:
    """Return the path and the JSON schema of every setting of an experiment that can be a number."""
    found = []
    for key, about in section.model_json_schema()["properties"].items():
        annotation = section.model_fields[key].annotation
        kinds = {about.get("type"), *(choice.get("type") for choice in about.get("anyOf", ()))}
        if hasattr(annotation, "model_fields"):
            found += numbers(annotation, f"{path}{key}.")
        elif kinds & {"integer", "number"}:
            found.append((path + key, about))
    return found


def test_every_number_of_schema_has_both_bounds() -> None:
    for path, about in numbers():
        choices = [choice for choice in [about, *about.get("anyOf", ())] if choice.get("type") in ("integer", "number")]
        for choice in choices or [about]:
            assert {"minimum", "exclusiveMinimum"} & choice.keys(), path
            assert {"maximum", "exclusiveMaximum"} & choice.keys(), path
