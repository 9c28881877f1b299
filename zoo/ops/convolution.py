"""Convolutions that are run again in backward: how they move over their input, in which dtype, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.context import is_autocast, without_autocast


class Geometry(NamedTuple):
    """How a convolution moves over its input, in the words of `torch.nn.Conv2d`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, conv: nn.Conv2d) -> Geometry:
        """Return that of a convolution whose padding is given in numbers."""
        return cls(conv.stride, conv.padding, conv.dilation, conv.groups)  # type: ignore[arg-type]


class Convolution(NamedTuple):
    """How a convolution moves over its input, and the dtype that it computes in: under autocast that of autocast."""

    geometry: Geometry
    dtype: torch.dtype

    @classmethod
    def of(cls, conv: nn.Conv2d, x: Tensor) -> Convolution:
        """Return the operation that ``conv`` is here for a tensor like x."""
        return cls(Geometry.of(conv), convolution_dtype(x))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x in a new tensor; autocast as it is now has no influence.

        The casts are explicit: autocast would cache a weight that was cast here, where no gradient is recorded.
        """
        bias = None if bias is None else bias.to(self.dtype)
        with without_autocast(x.device.type):
            return F.conv2d(x.to(self.dtype), weight.to(self.dtype), bias, *self.geometry)

    def backward(
        self, dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias, in their dtypes; None for those that are not ``needed``."""
        geometry = self.geometry
        gradients = torch.ops.aten.convolution_backward(
            dout.to(self.dtype), x.to(self.dtype), weight.to(self.dtype), None if bias is None else [bias.numel()],
            geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], geometry.groups, list(needed),
        )  # fmt: skip
        dtypes = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        dx, dweight, dbias = (
            gradient.to(dtype) if wanted else None
            for gradient, dtype, wanted in zip(gradients, dtypes, needed, strict=True)
        )
        return dx, dweight, dbias


def convolution_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a convolution of x computes in here: autocast leaves float64 alone."""
    if x.dtype == torch.float64 or not is_autocast(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
