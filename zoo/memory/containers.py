"""Walks through the contents of containers and objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)


def walk(name: str, value: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield a value and its nested contents, with names such as "output['logits']" and "output[0].boxes".

    ``seen`` has the ids of the containers and objects visited so far, each of which is visited once.
    """
    yield name, value
    seen = set() if seen is None else seen
    if id(value) not in seen:
        items = items_of(value)
        seen.update([id(value)] if items else [])
        for key, each in items:
            yield from walk(f"{name}{key}", each, seen)


def items_of(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a container or the attributes of an object, with keys such as "[0]" and ".boxes"."""
    if isinstance(value, (*PLAIN, type, nn.Module)):
        return []
    if isinstance(value, Tensor):
        return [(f"[{index}]", each) for index, each in enumerate(value.unbind())] if value.is_nested else []
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", each) for key, each in value.items()]  # unsorted: `zoo.check` compares the order
    if isinstance(value, (set, frozenset)):
        return [(f"{{{each!r}}}", each) for each in sorted(value, key=repr)]
    fields = getattr(value, "_fields", ())  # only named tuples have them
    if isinstance(value, Sequence) and not fields:
        return [(f"[{index}]", each) for index, each in enumerate(value)]
    names = {*fields, *getattr(value, "__dataclass_fields__", ()), *getattr(value, "__dict__", ())}
    return [(f".{each}", getattr(value, each)) for each in sorted(names) if hasattr(value, each)]


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a value, including attributes of objects such as dataclasses."""
    return [each for _, each in walk("", value) if isinstance(each, Tensor)]
