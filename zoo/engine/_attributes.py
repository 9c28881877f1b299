"""Finds attributes of modules that a forward pass changes. Checkpoints and other processes do not get attributes."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.engine._digest import digest
from zoo.torch_internals.data import is_wrapper, memory_id

MAX_OBJECTS = 2  # how deep to follow nested objects: deeper ones may be a whole program
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
LIBRARIES = ("torch.", "zoo.")  # their objects (hooks, plans) change without affecting outputs
OF_EACH_MODULE = nn.Module().__dict__.keys()

Values = dict[tuple[str, str], list[str]]


def attribute_values(model: nn.Module) -> Values:
    """Return the values of all attributes by module and attribute, as texts that are equal if the values are equal.

    Follows lists, dicts, sets, objects and random number generators. Omits parameters, buffers, functions, and objects
    of torch and zoo.
    """
    own = {memory_id(tensor) for tensor in (*model.parameters(), *model.buffers()) if not is_wrapper(tensor)}
    seen: dict[int, Any] = {id(module): module for module in model.modules()}  # keeps objects alive, and ids unique
    return {
        (path, name): list(_leaves(value, own, seen, 0))
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in OF_EACH_MODULE
    }


def changed_attribute(model: nn.Module, before: Values) -> str | None:
    """Describe the first attribute whose value differs from ``before``; None if there is none."""
    modules = dict(model.named_modules())
    after = attribute_values(model)
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            path, name = key
            return f"{name} of {path or 'the network'} ({type(modules[path]).__name__})"
    return None


def _leaves(value: Any, own: set[int], seen: dict[int, Any], depth: int) -> Iterator[str]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield repr(value)
        return
    if isinstance(value, CODE) or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        if is_wrapper(value) or value.is_meta:
            yield f"{value.dtype} {tuple(value.shape)}"
        elif memory_id(value) not in own:
            yield digest({"": value.detach()})
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif (state := _state_of(value)) is not None:
        yield state
    elif isinstance(value, Mapping):
        yield f"{len(value)} items"
        for key, item in value.items():
            yield from _leaves(key, own, seen, depth)
            yield from _leaves(item, own, seen, depth)
    elif isinstance(value, (list, tuple, deque)):
        yield f"{len(value)} items"
        for item in value:
            yield from _leaves(item, own, seen, depth)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(map(repr, value))
    elif not type(value).__module__.startswith(LIBRARIES) and type(value).__module__ != "torch":
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            yield repr(value)  # for example, an iterator of itertools shows its position
        elif depth < MAX_OBJECTS:
            yield from _leaves(dict(attributes), own, seen, depth + 1)


def _state_of(value: Any) -> str | None:
    """Return the state of a random number generator; None for another value."""
    if isinstance(value, torch.Generator):
        return digest({"": value.get_state()})
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.getstate()) if isinstance(value, random.Random) else None
