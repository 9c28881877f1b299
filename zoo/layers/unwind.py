"""A stage of pre-activation blocks that keeps its last sum for backward and finds the earlier ones again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zoo.layers.norm import InPlaceABN, InPlaceABNSync
from zoo.layers.norm_conv import has_hooks, is_plain, norm_conv, norm_of
from zoo.ops.recorded import is_recorded
from zoo.ops.unwind import ResidualSum, is_map_of, redone_norm


class UnwoundSequential(nn.Sequential):
    """Identity residual blocks of which backward keeps the inner norms' outputs and the stage's input and output.

    The sums between the blocks are found by subtraction (`ResidualSum`), the outputs of the blocks' first norms are
    computed again from them.  With ``redo_3x3`` the output of a bottleneck's last norm is not kept either but computed
    again by the 3x3 convolution before it; where there is dropout between, and in blocks of two convolutions, whose
    sum could not be undone then, it is kept.  Statistics are taken and counted once.  The results are those of the
    blocks one after the other; in half precision the stage rounds its sum once, instead of once per block.

    Norms that are not in place, convolutions of another kind, hooks on blocks or on what they hold, torch.compile and
    `torch.func` get the blocks as they are, with all that these keep.  Only the first block may have a projection.
    Source: the sums are undone as in Gomez et al., The Reversible Residual Network, 2017, but with blocks as they are.
    """

    def __init__(self, blocks: Any, redo_3x3: bool = False) -> None:
        super().__init__(blocks)
        self.redo_3x3 = redo_3x3
        if any(block.has_projection for block in list(self)[1:]):
            raise ValueError("only the first of the blocks to unwind may have a projection")

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output in a new tensor."""
        if not (isinstance(x, Tensor) and is_recorded() and all(map(_can_unwind, self))):
            return super().forward(x)
        sums = ResidualSum(num_additions=len(self))
        for block in self:
            x = self._add(block, x, sums)
        return x

    def _add(self, block: Any, x: Tensor, sums: ResidualSum) -> Tensor:
        """Return x plus the block's branch, or the block's projection plus its branch."""
        conv1, *inner, last = block.convs
        if block.has_projection:
            activated, remade = redone_norm(x, None, x, *norm_of(block.bn1, x))
            with remade.instead_of(is_map_of(activated)):
                shortcut, y = block.proj_conv(activated), conv1(activated)
        else:
            with sums.keeping(x):
                shortcut, y = x, norm_conv(block.bn1, conv1, x)
        if self.redo_3x3 and len(inner) == 3:
            norm2, conv2, norm3 = inner
            source = norm2(y)
            y = conv2(source)
            z, remade = redone_norm(source, conv2, y, *norm_of(norm3, y))
            return sums.add(z, last, shortcut, remade)
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
