"""Convolutions whose input backward recomputes: their hyperparameters, compute dtype and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.ops.context import is_autocast, without_autocast
from zoo.torch_internals.data import is_plain_layer


class Convolution(NamedTuple):
    """Hyperparameters of a `torch.nn.Conv2d`, and the dtype that it computes in (under autocast, autocast's dtype)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype

    @classmethod
    def of(cls, conv: nn.Conv2d, x: Tensor) -> Convolution:
        """Return the convolution that ``conv`` (with numeric padding) computes for x in the current autocast state."""
        return cls(conv.stride, conv.padding, conv.dilation, conv.groups, convolution_dtype(x))  # type: ignore[arg-type]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution of x in a new tensor, regardless of the current autocast state.

        Casts are explicit, because autocast would cache a weight that was cast without gradients.
        """
        bias = None if bias is None else bias.to(self.dtype)
        with without_autocast(x.device.type):
            return F.conv2d(x.to(self.dtype), weight.to(self.dtype), bias, *self[:4])

    def backward(
        self, dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias in their dtypes; None for each that is not ``needed``."""
        gradients = torch.ops.aten.convolution_backward(
            dout.to(self.dtype), x.to(self.dtype), weight.to(self.dtype), None if bias is None else [bias.numel()],
            self.stride, self.padding, self.dilation, False, [0, 0], self.groups, list(needed),
        )  # fmt: skip
        dtypes = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        dx, dweight, dbias = (
            gradient.to(dtype) if wanted else None
            for gradient, dtype, wanted in zip(gradients, dtypes, needed, strict=True)
        )
        return dx, dweight, dbias


def is_plain_convolution(conv: nn.Module, x: Tensor) -> bool:
    """Return whether `Convolution` computes what a call of ``conv`` for x does: it is an unchanged `torch.nn.Conv2d`.

    The padding must be numeric and with zeros. See `is_plain_layer` for what changes a layer.
    """
    if not is_plain_layer(conv, x, nn.Conv2d):
        return False
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)  # "same" or "valid"


def convolution_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a convolution of x computes in: the dtype of autocast if enabled, except for float64."""
    if x.dtype == torch.float64 or not is_autocast(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
