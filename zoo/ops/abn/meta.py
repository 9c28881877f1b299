"""The kernels for the meta device: they return tensors of the right shapes and compute nothing.

With them the memory of a network can be counted on the meta device as if it ran with compiled kernels. The reference
would add its temporaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops.abn.kernels import Means, NormSettings, new_vectors

backward = None
track_statistics = None
reduce_gradients = None
local_statistics = None
group_statistics = None
forward_ = None


def unavailable_reason() -> None:
    """Return None: always available."""


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, shape (C,)."""
    return new_vectors(x)


def apply(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> Tensor:
    """Return z."""
    return torch.empty_like(x)


def apply_(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> None:
    """Do nothing: meta tensors have no values."""


def backward_reduce(
    z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the two sums, shape (C,)."""
    return new_vectors(z)


def backward_apply(
    z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dx and, with a shortcut, dL/dshortcut."""
    return torch.empty_like(z), None if shortcut is None else torch.empty_like(z)
