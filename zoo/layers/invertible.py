"""Layers that a chain undoes one by one from the chain's output (`zoo.ops.reversible.run_chain`), in place.

Each is a link of one tensor: ``forward`` is ordinary torch, ``record_`` does the same in place, and ``undo_`` takes the
output and its gradient back, in place too.  Source: Hascoet et al., EURASIP JIVP 2023:1, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import ABN, InPlaceABN
from zoo.layers.recompute import paused_statistics
from zoo.ops.abn.functional import normalise
from zoo.ops.abn.kernels import NormSettings
from zoo.ops.abn.statistics import Statistics
from zoo.ops.invertible import (
    batch_pool,
    batch_unpool,
    batch_unpool_,
    channel_pool,
    channel_unpool,
    channel_unpool_,
    couple_,
    denormalise_,
    halves,
    norm_form,
    normalise_,
    unactivate_,
    uncouple_,
    undo_norm_,
)
from zoo.ops.reversible import Gradients, Tensors


class Invertible(nn.Module):
    """A layer that maps x of shape (N, C, H, W) to y, and can be undone; base of this file's layers."""

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of the contiguous x, and what `undo_` needs beside it."""
        raise NotImplementedError

    def undo_(self, y: Tensor, dy: Tensor, kept: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x in the memory of y, dx in the memory of dy, and the gradients of the parameters."""
        raise NotImplementedError

    def inverse(self, y: Tensor) -> Tensor:
        """Return x in a new tensor."""
        raise NotImplementedError

    def record(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in a new tensor, and what `reverse` needs beside it."""
        return self.record_(x.clone(memory_format=torch.contiguous_format))

    def reverse(self, y: Tensor, dy: Tensor, owned: bool, kept: Any) -> tuple[Tensor, Tensor | None, Gradients]:
        """Return x, dx and the gradients of the parameters; y and dy are overwritten only if ``owned``."""
        if not owned:
            y, dy = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (y, dy))
        return self.undo_(y, dy, kept)

    def steps(self) -> tuple[Use, ...]:
        """Return the layer as a link that remembers what this one use of it keeps."""
        return (Use(self),)


class Use:
    """One use of a layer in a chain, with what undoing it needs beside its output."""

    def __init__(self, layer: Invertible) -> None:
        self.layer = layer
        self.kept: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output in a new tensor; runs without gradients."""
        y, self.kept = self.layer.record(x)
        return y

    def modules(self) -> Iterable[nn.Module]:
        """Return those of the layer."""
        return self.layer.modules()

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[Tensors, Any, Gradients]:
        """Return the input, its gradient and those of the parameters."""
        x, dx, gradients = self.layer.reverse(ys[0], grads[0], owned, self.kept)
        return (x,), (dx,), gradients


class _Pool(Invertible):
    """Base of the pools, which move values: a subclass names the functions that do it, undo it and undo it in place."""

    pool: Callable[[Tensor], Tensor]
    unpool: Callable[[Tensor], Tensor]
    unpool_: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor."""
        return self.pool(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Return x in a new tensor."""
        return self.unpool(y)

    def record(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in a new tensor, and nothing."""
        return self.pool(x), None

    def undo_(self, y: Tensor, dy: Tensor, kept: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy."""
        return self.unpool_(y), self.unpool_(dy), {}


class ChannelPool(_Pool):
    """2x2 windows as channels: (N, C, H, W) -> (N, 4 C, H/2, W/2), see `zoo.ops.invertible.channel_pool`."""

    pool = staticmethod(channel_pool)
    unpool = staticmethod(channel_unpool)
    unpool_ = staticmethod(channel_unpool_)


class BatchPool(_Pool):
    """2x2 windows as images: (N, C, H, W) -> (4 N, C, H/2, W/2), see `zoo.ops.invertible.batch_pool`."""

    pool = staticmethod(batch_pool)
    unpool = staticmethod(batch_unpool)
    unpool_ = staticmethod(batch_unpool_)


class InvertibleLeakyReLU(Invertible):
    """Leaky ReLU; its inverse is the one of slope 1 / ``slope``."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor."""
        return F.leaky_relu(x, self.slope)

    def inverse(self, y: Tensor) -> Tensor:
        """Return x in a new tensor."""
        return F.leaky_relu(y, 1 / self.slope)

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of x, and nothing."""
        return F.leaky_relu_(x, self.slope), None

    def undo_(self, y: Tensor, dy: Tensor, kept: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy."""
        unactivate_(y, dy, self.slope)
        return y, dy, {}

    def extra_repr(self) -> str:
        """Return the slope."""
        return f"{self.slope}"


class InvertibleNorm(Invertible):
    """Batch norm y = (|weight| + eps_i) (x - mean) / sqrt(var + eps) + bias, undone with the statistics it was made of.

    ``norm`` holds parameters and running statistics, and takes the statistics of the batch, of all processes where it
    is synchronised; its activation is not used.  ``eps_i`` is the least gain, which bounds how much the inverse
    amplifies an error.  Source: Hascoet et al. 2023, section 4.2.1; in their code the ``eps_i`` did not arrive.
    """

    def __init__(self, norm: ABN, eps_i: float) -> None:
        super().__init__()
        if eps_i < 0:
            raise ValueError(f"eps_i, the least gain of an invertible norm, must be 0 or more, got {eps_i}")
        if not norm.affine:
            raise ValueError("an invertible norm has weight and bias; give it a norm that has them too (affine=True)")
        self.norm = norm if isinstance(norm, InPlaceABN) else InPlaceABN(norm.num_features, norm.eps, norm.momentum)
        self.eps_i = eps_i

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor; in training the batch is counted in the running statistics."""
        return normalise(x, self.norm.take_statistics(x), self._form(), inplace=False)

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """Return x in a new tensor, in evaluation mode; RuntimeError in training, as y does not tell x's statistics."""
        if self.norm.training:
            raise RuntimeError(
                "the inverse of a batch norm in training needs the statistics of its input; call eval() to invert with "
                "the running ones"
            )
        x = y.clone()
        denormalise_(x, self.norm.take_statistics(y), self._form())
        return x

    def record_(self, x: Tensor) -> tuple[Tensor, Statistics]:
        """Return y in the memory of x, and the statistics; in training the batch is counted."""
        statistics = self.norm.take_statistics(x)
        if statistics.num_values is None:  # the running ones, which move
            statistics = statistics._replace(mean=statistics.mean.clone())
        normalise_(x, statistics, self._form())
        return x, statistics

    def undo_(self, y: Tensor, dy: Tensor, kept: Statistics) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy, and the gradients of weight and bias."""
        weight, bias = self.norm.weight, self.norm.bias
        dgain, dbias = undo_norm_(y, dy, kept, self._form())
        return y, dy, {weight: torch.where(weight < 0, -dgain, dgain), bias: dbias}

    def _form(self) -> NormSettings:
        return norm_form(self.norm.weight, self.norm.bias, self.norm.eps, self.eps_i)

    def extra_repr(self) -> str:
        """Return the least gain."""
        return f"eps_i={self.eps_i}"


class Coupling(Invertible):
    """y1 = x1 + f(x2), y2 = x2 + g(y1) for the halves of the channels; base of the layers with modules f and g."""

    f: Any  # modules
    g: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return y in a new tensor."""
        x1, x2 = halves(x)
        y1 = x1 + self.f(x2)
        return torch.cat([y1, x2 + self.g(y1)], 1)

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """Return x in a new tensor; moves no running statistics."""
        y1, y2 = halves(y)
        with paused_statistics(self):
            x2 = y2 - self.g(y1)
            return torch.cat([y1 - self.f(x2), x2], 1)


class InvertibleConv(Coupling):
    """Coupling of which f and g are 3x3 convolutions without bias.

    Raises ValueError for an odd number of channels.  Source: Hascoet et al. 2023, section 4.2.3.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels % 2:
            raise ValueError(f"an invertible convolution needs an even number of channels, got {channels}")
        self.f = conv2d(channels // 2, channels // 2, 3)
        self.g = conv2d(channels // 2, channels // 2, 3)

    def record_(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return y in the memory of x, and nothing."""
        couple_(x, self.f, self.g)
        return x, None

    def undo_(self, y: Tensor, dy: Tensor, kept: Any) -> tuple[Tensor, Tensor, Gradients]:
        """Return x and dx in the memory of y and dy, and the gradients of the kernels."""
        return y, dy, uncouple_(y, dy, self.f, self.g)
