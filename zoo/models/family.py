"""The families of networks: their classes by name.

Tested by tests/config/test_options.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zoo.config.architectures import architecture
from zoo.layers.norm import NormFactory
from zoo.models.base import Network

AnyNetwork = TypeVar("AnyNetwork", bound=Network)

FAMILIES: dict[str, type[Network]] = {}


def family(name: str) -> Callable[[type[AnyNetwork]], type[AnyNetwork]]:
    """Return a decorator that makes a class the family ``name``."""

    def register(network: type[AnyNetwork]) -> type[AnyNetwork]:
        FAMILIES[name] = network
        return network

    return register


def network_class(name: str) -> type[Network]:
    """Return the class of an architecture; ConfigError if it is unknown."""
    return FAMILIES[architecture(name).family]


def build_architecture(name: str, norm: NormFactory | None, num_classes: int, **arguments: Any) -> Network:
    """Return an architecture with its structure; ``arguments`` are options and what every family takes."""
    return network_class(name).build(norm, num_classes, **{**architecture(name).structure, **arguments})
