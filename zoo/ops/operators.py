"""How functions of Python become operators of torch, which torch.compile takes as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# With flexible_layout the operators take tensors in the layout that they have. Without it torch.compile copies the
# output of every convolution to a contiguous tensor.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def operator(
    library: torch.library.Library, schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator of ``library`` without autograd; ``fake`` returns results without values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        library.define(schema, tags=TAGS)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
        return function

    return register
