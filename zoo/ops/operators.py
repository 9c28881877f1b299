"""Helpers for operators: registration with tags, and the dtype and memory of sums per channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# flexible_layout: the operators accept any layout. Without it torch.compile copies the output of every convolution to a
# contiguous tensor.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def operator(
    library: torch.library.Library, schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as an operator without autograd; ``fake`` is its fake kernel.

    torch.compile does not trace into operators.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        library.define(schema, tags=TAGS)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
        return function

    return register


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics and sums of tensors of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in its accumulation dtype. torch.fx can trace it without knowing the dtype."""
    return x.double() if x.dtype is torch.float64 else x.float()


def new_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two uninitialized vectors with one value per channel of x, in the accumulation dtype."""
    dtype = accumulate_dtype(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)
