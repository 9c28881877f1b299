"""Registers Python functions as torch operators, which torch.compile does not trace into.

Tested by tests/ops/abn/test_native.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# flexible_layout: the operators accept any layout. Without it torch.compile copies the output of every convolution to a
# contiguous tensor.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def operator(
    library: torch.library.Library, schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as an operator without autograd; ``fake`` is its fake kernel."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        library.define(schema, tags=TAGS)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
        return function

    return register
