"""Stages of residual blocks, which the option ``memory`` makes plain, checkpointed, or with sums that are undone."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from zoo.layers.checkpointing import checkpoint
from zoo.layers.norm import InPlaceABN, InPlaceABNSync
from zoo.layers.norm_conv import is_plain, norm_conv, statistics_and_settings
from zoo.ops.context import is_fx_proxy, is_recorded
from zoo.ops.residual_inversion import ResidualSum, is_same_as, recomputed_norm
from zoo.torch_internals import has_hooks

# The option ``memory`` -> whether the last norm of a post-activation block adds and activates, see `ResidualBlock`.
FUSE_OF_MEMORY = {"plain": "never", "auto": "auto", "fused": "always", "checkpoint": "auto"}


def build_stage(blocks: OrderedDict[str, nn.Module], memory: str) -> nn.Sequential:
    """Return the residual blocks as one module that runs them in order."""
    if memory == "checkpoint":
        return CheckpointedSequential(blocks)
    if memory in ("unwind", "unwind_3x3"):
        return ResidualInversion(blocks, redo_3x3=memory == "unwind_3x3")
    return nn.Sequential(blocks)


class CheckpointedSequential(nn.Sequential):
    """Modules in order; backward keeps only their inputs and runs each module again, see `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the last module's output."""
        for module in self:
            x = module(x) if is_fx_proxy(x) else checkpoint(module, x)
        return x


class ResidualInversion(nn.Sequential):
    """Identity residual blocks that save the outputs of their inner norms and the stage's input and output.

    Backward computes the sums between the blocks by subtraction (`ResidualSum`), and recomputes the outputs of the
    blocks' first norms from them. Statistics are computed once. The results equal those of a plain sequence of the
    blocks, except that in half precision the sum is rounded once per stage instead of once per block.

    The blocks run as a plain sequence if norms are not in-place, convolutions are of another type, or modules have
    hooks, and under torch.compile and `torch.func`.

    Args:
    - `blocks`: `IdentityResidualBlock`s by name; only the first may have a projection (ValueError).
    - `redo_3x3`: also recompute the output of a bottleneck's last norm from the 3x3 convolution before it. It is saved
      if there is dropout between the two, and in blocks of two convolutions, whose sum could not be inverted otherwise.

    Source: inversion as in Gomez et al., The Reversible Residual Network, 2017, but of unmodified blocks.
    """

    def __init__(self, blocks: Any, redo_3x3: bool = False) -> None:
        super().__init__(blocks)
        self.redo_3x3 = redo_3x3
        if any(block.has_projection for block in list(self)[1:]):
            raise ValueError("only the first of the blocks to unwind may have a projection")

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output in a new tensor."""
        if is_fx_proxy(x) or not is_recorded() or not all(map(_can_unwind, self)):
            return super().forward(x)
        sums = ResidualSum(num_additions=len(self))
        for block in self:
            x = self._add(block, x, sums)
        return x

    def _add(self, block: Any, x: Tensor, sums: ResidualSum) -> Tensor:
        """Return x plus the block's branch, or the block's projection plus its branch."""
        conv1, *inner, last = block.convs
        if block.has_projection:
            activated, recomputed = recomputed_norm(x, None, x, *statistics_and_settings(block.bn1, x))
            with recomputed.saved_instead_of(is_same_as(activated)):
                shortcut, y = block.proj_conv(activated), conv1(activated)
        else:
            with sums.saved_instead_of(x):
                shortcut, y = x, norm_conv(block.bn1, conv1, x)
        if self.redo_3x3 and len(inner) == 3:
            norm2, conv2, norm3 = inner
            source = norm2(y)
            y = conv2(source)
            z, recomputed_z = recomputed_norm(source, conv2, y, *statistics_and_settings(norm3, y))
            return sums.add(z, last, shortcut, recomputed_z)
        for layer in inner:
            y = layer(y)
        return sums.add(y, last, shortcut)


def _can_unwind(block: Any) -> bool:
    modules = list(block.modules())
    return (
        not any(map(has_hooks, modules))
        and all(type(module) in (InPlaceABN, InPlaceABNSync) for module in modules if hasattr(module, "running_mean"))
        and all(is_plain(module) for module in modules if hasattr(module, "kernel_size"))
    )
