"""The kernels for tensors on the meta device: they return tensors of the right shapes and compute nothing.

With them a network on the meta device takes as many bytes as on a device with compiled kernels. The reference would
also count its temporaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.ops.abn.kernels import Means, NormSettings, accumulate_dtype

backward = None
track_statistics = None
reduce_gradients = None
local_statistics = None
group_statistics = None
forward_ = None


def unavailable_reason() -> None:
    """Return None: there is nothing to build."""


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance, shape (C,)."""
    return _vector(x), _vector(x)


def apply(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> Tensor:
    """Return z."""
    return torch.empty_like(x)


def apply_(x: Tensor, mean: Tensor, var: Tensor, settings: NormSettings, shortcut: Tensor | None = None) -> None:
    """Leave x as it is: there are no numbers to overwrite."""


def backward_reduce(
    z: Tensor, dz: Tensor, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the two sums, shape (C,)."""
    return _vector(z), _vector(z)


def backward_apply(
    z: Tensor, dz: Tensor, var: Tensor, means: Means, settings: NormSettings, shortcut: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dx and, with a shortcut, dL/dshortcut."""
    return torch.empty_like(z), None if shortcut is None else torch.empty_like(z)


def _vector(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=accumulate_dtype(x.dtype))
