"""The Python state that forward may change beside its outputs: attributes, what they contain, and torch's caches.

Tested by tests/remat/test_trial.py.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.ops.context import rewind_of
from zoo.torch_internals.data import FakeTensor, parametrization_cache

MAX_OBJECTS = 2  # of classes other than modules that are nested in each other: more may be a whole program
MAX_HOLDERS = 100  # that are searched for a name
CONTAINERS = (dict, list, deque, set, CellType)
LEAVES = (str, bytes, int, float, complex, type, ModuleType, Tensor, np.ndarray)

Container: TypeAlias = dict[Any, Any] | list[Any] | deque[Any] | set[Any] | CellType


class PythonState:
    """A snapshot, before forward, of the objects that the attributes of a module and its submodules refer to.

    Lists, dicts, sets, deques, tuples and objects are followed, and so are the variables of hooks. Until `restore`,
    tensors in them, other than parameters and buffers, are replaced by detached copies, so that forward overwrites none
    of the user's tensors and backward runs through none of the user's graphs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = {id(each) for each in (*module.parameters(), *module.buffers())}
        self._seen: dict[int, Any] = {}
        self._copies: dict[int, Any] = {}
        self._containers: list[tuple[Container, Any]] = []
        self._rewinds: list[Callable[[], object]] = []
        self._follow(module)
        for container, before in self._containers:
            _assign(container, self._copied_items(before))
        cache = parametrization_cache()
        self._containers.append((cache, dict(cache)))
        cache.clear()

    def restore(self) -> None:
        """Restore the attributes, the contents of containers, and the states of random number generators."""
        for container, before in self._containers:
            _assign(container, before)
        for rewind in self._rewinds:
            rewind()

    def _follow(self, module: nn.Module) -> None:
        waiting: list[tuple[Any, int]] = [(module, 0)]
        while waiting:
            value, depth = waiting.pop()
            if value is None or isinstance(value, LEAVES) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            rewind = rewind_of(value)
            if rewind is not None:
                self._rewinds.append(rewind)
                continue
            if isinstance(value, CONTAINERS):
                self._containers.append((value, _items(value)))
            is_object = not isinstance(value, (nn.Module, tuple, frozenset, *CONTAINERS))
            if depth < MAX_OBJECTS or not is_object:
                waiting += ((each, depth + is_object) for each in _referents(value))

    def _copied_items(self, items: Any) -> Any:
        if isinstance(items, dict):
            return {key: self._copied(each) for key, each in items.items()}
        return items if isinstance(items, set) else [self._copied(each) for each in items]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self._copied(each) for each in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            make = getattr(type(value), "_make", type(value))
            return make(items)
        is_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and id(value) not in self._own
        if not is_tensor and type(value) is not np.ndarray:
            return value
        if id(value) not in self._copies:
            if is_tensor:
                self._copies[id(value)] = value.detach().requires_grad_(value.requires_grad).clone()
            else:
                self._copies[id(value)] = value.copy()
        return self._copies[id(value)]


def _items(container: Container) -> Any:
    """Return a copy of the items of a container: a dict, a set or a list."""
    if isinstance(container, dict):
        return dict(container.items())
    if isinstance(container, CellType):
        try:
            return [container.cell_contents]
        except ValueError:  # it is empty
            return []
    return set(container) if isinstance(container, set) else list(container)


def _assign(container: Container, items: Any) -> None:
    """Replace the items of a container, unless it contains these objects already."""
    now = _items(container)
    if isinstance(container, dict):
        if list(map(id, now)) + list(map(id, now.values())) != list(map(id, items)) + list(map(id, items.values())):
            base = OrderedDict if isinstance(container, OrderedDict) else dict  # whose methods a subclass may refuse
            base.clear(container)
            for key, value in items.items():
                base.__setitem__(container, key, value)
    elif isinstance(container, set):
        if now != items:
            container.clear()
            container.update(items)
    elif list(map(id, now)) != list(map(id, items)):
        if isinstance(container, CellType):
            container.cell_contents = items[0]
        else:
            container.clear()
            container.extend(items)


def _referents(value: Any) -> Iterator[Any]:
    """Yield the objects that a value refers to and that forward may change."""
    home = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    attributes: Any = getattr(value, "__dict__", None)
    is_object = type(attributes) is dict and not isinstance(value, nn.Module)
    if is_object and ("only_observes" in attributes or str(home).startswith("torch.")):
        return
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, CellType):
        yield from _items(value)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from value
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__)
        names = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (each for each in names if not isinstance(each, FunctionType))
    if type(attributes) is dict:
        yield attributes


@contextmanager
def collected(place: str) -> Iterator[None]:
    """Return a context for training steps that leaves no garbage and no tensors with a history behind.

    Garbage collection in it examines only newer objects. Otherwise it would take longer than a step of a small network.

    Raises ConfigError, with the ``place``, if forward has put a tensor with a history where `PythonState` finds none.
    Its graph has been freed, and training that used the tensor would fail.
    """
    is_frozen = gc.get_freeze_count() > 0  # by the user; the rest could not be told apart afterwards
    if not is_frozen:
        gc.freeze()
    known = set(map(id, _tensors_with_history()))
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # it holds casts from graphs that are gone
        gc.collect()
        left = [each for each in _tensors_with_history() if id(each) not in known]
        if not is_frozen:
            gc.unfreeze()
    if left:
        raise ConfigError(
            f"forward leaves a tensor of shape {tuple(left[0].shape)} with its history in {_holder_of(left[0])}, where "
            "steps that are measured before training cannot restore it",
            place,
            "keep it in an attribute of the network, or detach it",
        )


def _tensors_with_history() -> list[Tensor]:
    """Return the tensors with a history among the objects that the garbage collector has not frozen."""
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor) and not isinstance(each, FakeTensor))
    return [each for each in found if each.grad_fn is not None]


def _holder_of(value: Any) -> str:
    """Return the name of an attribute or variable through which a value is referred to, such as "Cache.states"."""
    waiting, seen = [value], {id(value)}
    for each in waiting:  # which grows
        for referrer in gc.get_referrers(each):
            if isinstance(referrer, FunctionType):
                return f"a variable of {referrer.__qualname__}"
            for owner in (referrer, *(gc.get_referrers(referrer) if isinstance(referrer, dict) else ())):
                attributes = getattr(owner, "__dict__", None)
                if isinstance(attributes, dict | MappingProxyType) and owner is not waiting:
                    kind = owner if isinstance(owner, ModuleType | type) else type(owner)
                    for name, item in attributes.items():
                        if item is each:
                            return f"{kind.__name__}.{name}"
            if isinstance(referrer, (tuple, *CONTAINERS)) and referrer is not waiting and id(referrer) not in seen:
                seen.add(id(referrer))
                waiting.append(referrer)
        if len(waiting) > MAX_HOLDERS:
            break
    return "a place outside of the network"
