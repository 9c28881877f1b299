"""Links of pairs of halves that i-RevNets have beside reversible blocks, for `zoo.layers.ReversibleSequential`."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.recompute import paused_statistics
from zoo.layers.reversible import Pair, reverse_branch
from zoo.ops.invertible import channel_pool, channel_unpool
from zoo.ops.reversible import Gradients, Tensors


class PairPool(nn.Module):
    """Channel pool of each half: (N, C, H, W) -> (N, 4 C, H/2, W/2), see `zoo.ops.invertible.channel_pool`."""

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        """Return the pooled halves in new tensors."""
        return channel_pool(x1), channel_pool(x2)

    def inverse(self, y1: Tensor, y2: Tensor) -> Pair:
        """Return the halves before the pool in new tensors."""
        return channel_unpool(y1), channel_unpool(y2)

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[Tensors, Tensors, Gradients]:
        """Return inputs and gradients in new tensors; there are no parameters."""
        return self.inverse(*ys), self.inverse(*grads), {}


class ShiftBlock(nn.Module):
    """(x1, x2) -> (x2, x1 + branch(x2)); with stride 2 x1 and x2 are pooled by channels, and the branch strides.

    The branch: norm, 3x3 with the stride to a quarter of the width, norm, 3x3, dropout, norm, 3x3.  The first of a
    network has no ``leading_norm``.  Source: Jacobsen et al., i-RevNet, ICLR 2018, and its code.
    """

    def __init__(
        self, in_channels: int, channels: int, norm: NormFactory, stride: int, leading_norm: bool, dropout: float
    ) -> None:
        super().__init__()
        inner = channels // 4
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if leading_norm:
            layers["bn1"] = out_of_place(norm(in_channels))
        layers["conv1"] = conv2d(in_channels, inner, 3, stride=stride)
        layers["bn2"], layers["conv2"] = norm(inner), conv2d(inner, inner, 3)
        layers["dropout"] = nn.Dropout(dropout)
        layers["bn3"], layers["conv3"] = norm(inner), conv2d(inner, channels, 3)
        self.branch = nn.Sequential(layers)
        self.stride = stride

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        """Return (y1, y2)."""
        return self._pool(x2), self._pool(x1) + self.branch(x2)

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor) -> Pair:
        """Return (x1, x2); moves no running statistics."""
        with paused_statistics(self):
            x2 = self._unpool(y1)
            return self._unpool(y2 - self.branch(x2)), x2

    def reverse(self, ys: Tensors, grads: Tensors, owned: bool) -> tuple[Tensors, Tensors, Gradients]:
        """Return inputs, their gradients and those of the parameters; y2 is overwritten if ``owned``."""
        x2, dx2 = self._unpool(ys[0]), self._unpool(grads[0])
        x1, dx2, gradients = reverse_branch(self.branch, x2, ys[1], (dx2, grads[1]), owned)
        return (self._unpool(x1), x2), (self._unpool(grads[1]), dx2), gradients

    def _pool(self, x: Tensor) -> Tensor:
        return channel_pool(x) if self.stride == 2 else x

    def _unpool(self, y: Tensor) -> Tensor:
        return channel_unpool(y) if self.stride == 2 else y
