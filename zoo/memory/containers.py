"""What containers and objects contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)


def named(name: str, value: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that it contains, with names such as "output['logits']" and "output[0].boxes".

    Containers and objects whose ids are in ``seen`` are not taken apart again, so that cycles end.
    """
    yield name, value
    seen = set() if seen is None else seen
    if id(value) not in seen:
        items = items_of(value)
        seen.update([id(value)] if items else [])
        for key, each in items:
            yield from named(f"{name}{key}", each, seen)


def items_of(value: Any) -> list[tuple[str, Any]]:
    """Return what a container or an object contains, with the names of keys, positions or attributes."""
    if isinstance(value, (*PLAIN, type, nn.Module)):
        return []
    if isinstance(value, Tensor):
        return [(f"[{index}]", each) for index, each in enumerate(value.unbind())] if value.is_nested else []
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", each) for key, each in value.items()]  # whose order is compared
    if isinstance(value, (set, frozenset)):
        return [(f"{{{each!r}}}", each) for each in sorted(value, key=repr)]
    fields = getattr(value, "_fields", ())  # of a named tuple
    if isinstance(value, Sequence) and not fields:
        return [(f"[{index}]", each) for index, each in enumerate(value)]
    names = {*fields, *getattr(value, "__dataclass_fields__", ()), *getattr(value, "__dict__", ())}
    return [(f".{each}", getattr(value, each)) for each in sorted(names) if hasattr(value, each)]


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a value, including attributes of objects such as dataclasses."""
    return [each for _, each in named("", value) if isinstance(each, Tensor)]
