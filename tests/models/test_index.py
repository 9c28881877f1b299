"""The index of networks, which is readable without torch, agrees with the families."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import zoo.models
from zoo.config.architectures import ARCHITECTURES, INDEX, Architecture, network_sizes, read_index
from zoo.config.parse import experiment_names, experiments_dir, load_experiment
from zoo.config.schema import section_of
from zoo.config.section import Section
from zoo.models.family import RECORDS
from zoo.models.sizes import measure_sizes

REMEDY = "python -m tests.golden writes the index"


def records() -> dict[str, Architecture]:
    """Return the architectures that the modules of this package define, in the order of the index."""
    for module in pkgutil.iter_modules(zoo.models.__path__):
        import_module(f"zoo.models.{module.name}")
    found = {name: record for name, record in RECORDS.items() if record.module.startswith("zoo.")}
    return {name: found[name] for name in dict.fromkeys([*ARCHITECTURES, *sorted(found)]) if name in found}


def facts(record: Architecture) -> dict[str, Any]:
    """Return the entry of an architecture in the index: facts that are not defaults."""
    content = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if field.name != "name" and getattr(record, field.name) != field.default
    }
    return content | {"options": record.options.__name__}


def published_names() -> list[str]:
    """Return the experiments with weights: in the order of checksums.md5, and then others, sorted."""
    lines = (experiments_dir().parent / "checksums.md5").read_text().splitlines()
    original = [line.split()[1].removesuffix(".pth.tar") for line in lines]
    expected = {name: load_experiment(name).expected for name in experiment_names()}
    others = [name for name, scores in expected.items() if scores is not None and scores.weights is not None]
    return list(dict.fromkeys([*original, *others]))


def index_text(index: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the index, with a line per entry."""
    sections = [
        f"{json.dumps(title)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in section.items())
        + "\n}"
        for title, section in index.items()
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


def generated() -> dict[Path, str]:
    """Return the index. The sizes of existing networks do not change."""
    found = records()
    ARCHITECTURES.update(found)  # the files written next also describe them
    options = {record.options.__name__: record.options.model_json_schema() for record in found.values()}
    old = {case: sizes for case, sizes in network_sizes().items() if case.partition("+")[0] in found}
    new = {name: measure_sizes(name) | {"frozen_from": "our first release"} for name in found if name not in old}
    index = {
        "options": options,
        "architectures": {name: facts(record) for name, record in found.items()},
        "sizes": old | new,
        "published": {name: load_experiment(name).network.arch for name in published_names()},
    }
    return {INDEX: index_text(index)}


def test_index_matches_families_and_experiments() -> None:
    assert generated() == {INDEX: INDEX.read_text()}, REMEDY


@pytest.mark.parametrize("name", read_index()["options"])
def test_section_of_schema_has_same_schema(name: str) -> None:
    schema = read_index()["options"][name]
    assert section_of(schema).model_json_schema() == schema


def test_sections_of_same_name_are_same_and_have_no_validators() -> None:
    sections: dict[str, type[Section]] = {}
    for record in records().values():
        if record.module.startswith("zoo.models"):
            assert sections.setdefault(record.options.__name__, record.options) is record.options
    for section in sections.values():
        own = section.__pydantic_decorators__
        inherited = Section.__pydantic_decorators__
        assert (own.field_validators, own.model_validators.keys()) == ({}, inherited.model_validators.keys())
        assert section.conflicts is Section.conflicts
