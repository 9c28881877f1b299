"""The options of each family of networks: they are the arguments of its class, and are explained and bounded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from zoo.config.architectures import ARCHITECTURES, Architecture
from zoo.config.describe import describe_options
from zoo.config.network import NetworkSpec
from zoo.models.base import Network
from zoo.models.family import network_class

# What `build_network` passes to every family, and the option that it passes to `Network.set_drop_path_rate`.
COMMON = {"memory", "features_only"}
SET_AFTERWARDS = {"drop_path_rate"}


def keyword_arguments(name: str) -> Iterator[str]:
    """Yield the keyword arguments of an architecture's class, including those for its base class."""
    network = network_class(name)
    builds_itself = network.build.__func__ is not Network.build.__func__  # type: ignore[attr-defined]
    callables = [network.build] if builds_itself else [base.__init__ for base in network.__mro__]
    for function in callables:
        parameters = inspect.signature(function).parameters.values()
        yield from (each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty)
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return


def _body_arguments(arch: Architecture) -> set[str]:
    if arch.family == "pyramid":
        body = ARCHITECTURES[arch.structure["body"]]
        return {*keyword_arguments(body.name)} - body.structure.keys()
    return {"input_3x3"} & set(arch.options.model_fields) if arch.family == "deeplab" else set()


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_options_of_network_are_arguments_of_its_class(arch: Architecture) -> None:
    arguments = {*keyword_arguments(arch.name), *_body_arguments(arch)}
    assert set(arch.options.model_fields) - SET_AFTERWARDS == arguments - arch.structure.keys() - COMMON


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_option_is_explained_with_its_values_and_default(arch: Architecture) -> None:
    described = describe_options(arch)
    assert described.keys() == {*arch.options.model_fields, "memory"}
    assert all("default" in text and text[0].isupper() for text in described.values())
    assert all(field.description for field in arch.options.model_fields.values())


def test_tuples_equal_lists_and_only_given_options_are_stored() -> None:
    spec = NetworkSpec(arch="revnext", options={"blocks": (3, 4)})
    assert spec.options == {"blocks": [3, 4]}
    assert spec == NetworkSpec(arch="revnext", options={"blocks": [3, 4]})


def test_custom_network_may_have_any_options() -> None:
    assert NetworkSpec(arch="mine", options={"dilation": "wide"}).options == {"dilation": "wide"}
