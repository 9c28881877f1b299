"""The layer of each parameter, from stem to head, for ``optimizer.layer_decay``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from torch import nn

from zoo.models.base import WITH_PREVIOUS
from zoo.models.classifier import classifier_parameters
from zoo.torch_internals.data import NormBase

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Matcher = Mapping[str, Any] | Callable[[str], Any]


def layers_of(model: nn.Module) -> dict[str, int]:
    """Return the number of the layer of each parameter by name, from 0 for the stem; the classifier is in the last one.

    A method ``group_matcher``, as in networks of this package and of timm, determines the layers as for
    `timm.models.group_parameters`. In other networks, such as torchvision's, each entry of an outermost
    `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict` is a layer; an entry that is a plain `nn.Sequential` is replaced
    by its own entries. Parameters before the first entry form layer 0. A norm, and parameters after an entry, belong to
    the layer before them. The classifier is a separate layer.
    """
    names = [name for name, _ in model.named_parameters()]
    find_matcher: Any = getattr(model, "group_matcher", None)
    if find_matcher is not None:
        matcher: Matcher = find_matcher(coarse=False)
        return _matched(names, matcher)
    classifier = set(map(id, classifier_parameters(model)))
    of_classifier = {name for name, parameter in model.named_parameters() if id(parameter) in classifier}
    layers = _in_order(model, [name for name in names if name not in of_classifier])
    return {**layers, **dict.fromkeys(of_classifier, max(layers.values(), default=-1) + 1)}


def _matched(names: Iterable[str], matcher: Matcher) -> dict[str, int]:
    """Return the layers by a matcher in timm's format: a function, or regular expressions by group."""
    key: Callable[[str], tuple[float, ...]]
    if callable(matcher):
        found = matcher

        def key(name: str) -> tuple[float, ...]:
            number = found(name)
            return tuple(number) if isinstance(number, Iterable) else (number,)
    else:
        rules = list(_rules(matcher))

        def key(name: str) -> tuple[float, ...]:
            for order, expression, suffix in rules:
                if match := re.match(expression, name):
                    return tuple(map(float, (order, *filter(None, match.groups()), *suffix)))
            return (math.inf,)

    layers: dict[str, int] = {}
    number = -1
    for of_group, group in groupby(sorted(names, key=key), key):
        if number < 0 or of_group[-1] != WITH_PREVIOUS[0]:
            number += 1
        layers.update(dict.fromkeys(group, number))
    return layers


def _rules(matcher: Mapping[str, Any]) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Yield the number of the group, the expression, and the suffix of the numbers that the expression finds."""
    for order, rules in enumerate(matcher.values()):
        if isinstance(rules, str):
            yield order, rules, ()
        else:
            yield from ((order, expression, suffix or ()) for expression, suffix in rules or ())


def _in_order(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    entries = dict(_entries(model, "", inside=False))
    layers: dict[str, int] = {}
    number, last = 0, None
    for name in names:
        parts = name.split(".")
        own = next((each for end in range(1, len(parts)) if (each := ".".join(parts[:end])) in entries), None)
        if own not in (None, last):
            if layers and not isinstance(entries[own], NormBase):
                number += 1
            last = own
        layers[name] = number
    return layers


def _entries(module: nn.Module, prefix: str, inside: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the entries that form layers."""
    is_container = isinstance(module, CONTAINERS)
    for name, child in module.named_children():
        own = f"{prefix}{name}"
        if (inside or is_container) and type(child) is not nn.Sequential:
            yield own, child
        else:
            yield from _entries(child, f"{own}.", inside or is_container)
