"""The registry of families. A decorator registers a class with its architectures and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from zoo.config.architectures import ARCHITECTURES, BUNDLED, LEAN, Architecture, architecture
from zoo.config.options import NoOptions
from zoo.config.section import Section
from zoo.errors import ConfigError
from zoo.layers.norm import NormFactory
from zoo.models.base import Network

AnyNetwork = TypeVar("AnyNetwork", bound=Network)

CHECKPOINTED = ("auto", "plain", "checkpoint")  # the memory strategies of networks that save activations

FAMILIES: dict[str, type[Network]] = {}  # name of a family -> class, for imported modules
RECORDS: dict[str, Architecture] = {}  # name of an architecture -> facts, for imported modules
HEADS: dict[str, Callable[[Architecture], Architecture | None]] = {}  # name of a family -> `on`, see `head`


def family(
    name: str,
    networks: Mapping[str, Mapping[str, Any]],
    *,
    options: type[Section] = NoOptions,
    memory: tuple[str, ...] = ("auto", "plain"),
    dilations: Mapping[int, Any] | None = None,
    **facts: Any,
) -> Callable[[type[AnyNetwork]], type[AnyNetwork]]:
    """Decorator that registers a class as the family ``name``, with these networks.

    The class takes a norm factory, the number of classes, and as keywords ``features_only``, ``memory``, the structure
    of the network and its options. A class may be decorated several times, for networks with other facts.

    Args:
    - `networks`: maps names to structures, which are fixed arguments of the class.
    - `options`: the section of arguments that users choose. Its settings have bounds and docstrings, but no validators.
    - `memory`, `dilations`, `**facts`: see `Architecture`; every network also has the strategy "lean".

    Raises ConfigError if another module has a family or a network of the same name.
    """

    def register(network: type[AnyNetwork]) -> type[AnyNetwork]:
        _add_family(name, network)
        for each, structure in networks.items():
            strategies = (*memory, LEAN)
            _add(Architecture(each, name, network.__module__, structure, options, strategies, dilations or {}, **facts))
        return network

    return register


def head(
    name: str, on: Callable[[Architecture], Architecture | None]
) -> Callable[[type[AnyNetwork]], type[AnyNetwork]]:
    """Decorator that registers a class as the family ``name``, with a network on each body that ``on`` accepts.

    ``on`` maps the facts of a body to the facts of the network, or to None.
    """

    def register(network: type[AnyNetwork]) -> type[AnyNetwork]:
        _add_family(name, network)
        HEADS[name] = on
        for body in list(RECORDS.values()):
            _add_on(body, on)
        return network

    return register


def _add_family(name: str, network: type[Network]) -> None:
    modules = {record.module for record in ARCHITECTURES.values() if record.family == name}
    if modules - {network.__module__}:
        raise ConfigError(f"is a family of {', '.join(modules)}", name, f"rename the family of {network.__module__}")
    FAMILIES[name] = network


def _add(record: Architecture) -> None:
    """Register an architecture and the networks with a head on it, unless the index has them (bundled ones)."""
    known = ARCHITECTURES.get(record.name, record)
    if known.module != record.module:
        raise ConfigError(f"is a network of {known.module}", record.name, f"rename the network of {record.module}")
    RECORDS[record.name] = record
    if record.name not in BUNDLED:
        ARCHITECTURES[record.name] = record
    for on in HEADS.values():
        _add_on(record, on)


def _add_on(body: Architecture, on: Callable[[Architecture], Architecture | None]) -> None:
    record = on(body)
    if record is not None:
        _add(record)


def network_class(name: str) -> type[Network]:
    """Import the module of an architecture and return its class. Raises ConfigError for an unknown name."""
    record = architecture(name)
    if record.family not in FAMILIES:
        import_module(record.module)
    return FAMILIES[record.family]


def build_architecture(name: str, norm: NormFactory | None, num_classes: int, **arguments: Any) -> Network:
    """Build an architecture. ``arguments`` are its options and the arguments that every family takes."""
    return network_class(name).build(norm, num_classes, **{**architecture(name).structure, **arguments})
