"""RevNets: residual networks that reconstruct activations from the outputs of blocks (Gomez et al. 2017)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zoo.config.options import ReversibleOptions
from zoo.layers.checkpointing import checkpoint
from zoo.layers.norm import NormFactory
from zoo.layers.reversible import ReversibleBlock, ReversibleSequential
from zoo.layers.revnet_blocks import TransitionBlock, build_preact_branch
from zoo.models.family import family
from zoo.models.preact import ModuleShape, PreactNetwork
from zoo.ops.context import is_fx_proxy

WIDTHS = (128, 128, 256, 512, 832)
# ResNet -> its RevNet counterpart in Gomez et al. 2017, Table 2.
REVERSIBLE_TWINS = {
    "resnet32_cifar": "revnet38_cifar",
    "resnet110_cifar": "revnet110_cifar",
    "resnet164_cifar": "revnet164_cifar",
    "resnet101_preact": "revnet104",
}


@family(
    "revnet",
    {
        "revnet38_cifar": {"structure": (3, 3, 3), "widths": (32, 32, 64, 112), "bottleneck": False},
        "revnet110_cifar": {"structure": (9, 9, 9), "widths": (32, 32, 64, 128), "bottleneck": False},
        "revnet164_cifar": {"structure": (9, 9, 9), "widths": (32, 32, 64, 128), "bottleneck": True},
    },
    options=ReversibleOptions,
    input="cifar",
)
@family(
    "revnet",
    {
        "revnet56": {"structure": (2, 2, 3, 2), "widths": WIDTHS, "bottleneck": True},
        # 45,428,072 parameters; 45.2 M in the paper
        "revnet104": {"structure": (2, 2, 11, 2), "widths": WIDTHS, "bottleneck": True},
    },
    options=ReversibleOptions,
)
class RevNet(PreactNetwork):
    """RevNet, with modules of reversible blocks; ``widths`` must be even.

    A block has two residual functions, each on half of the channels, and counts twice in the depth of the network's
    name.

    ``memory`` selects what is saved for backward. "auto": the output of each module, and the input of a first block
    that changes stride or width, which is the output of the previous module; backward recomputes the stem and all
    blocks. "plain": all activations, with torch's pooling.

    ``grid_bits`` is passed to the chains, see `ReversibleSequential`.
    """

    def __init__(
        self, norm: NormFactory, num_classes: int, *, grid_bits: int | None, memory: str, **options: Any
    ) -> None:
        self._grid_bits = grid_bits  # set first: the base class calls `_build_module`, which reads it
        super().__init__(norm, num_classes, memory=memory, **options)
        # In a network for ImageNet, the stem has the largest maps, and backward needs them last.
        self.recomputed = () if memory == "plain" else ("mod1",)

    def _build_module(self, shape: ModuleShape, norm: NormFactory, memory: str) -> nn.Module:
        return ReversibleModule(shape, norm, store=memory == "plain", grid_bits=self._grid_bits)


class ReversibleModule(nn.Module):
    """The blocks of one resolution: ``first``, if it changes stride or width, and the ``chain`` of all other blocks.

    The input of ``first`` and the chain's output are saved for backward; with ``chain.store``, all activations.
    """

    def __init__(self, shape: ModuleShape, norm: NormFactory, store: bool, grid_bits: int | None) -> None:
        super().__init__()
        in_channels, out_channels, bottleneck, blocks, stride, leading_norm = shape
        changes_shape = stride > 1 or in_channels != out_channels
        if changes_shape:
            self.first = TransitionBlock(in_channels, out_channels, norm, bottleneck, stride, leading_norm)
        half = out_channels // 2
        chain = (
            ReversibleBlock(
                build_preact_branch(half, half, norm, bottleneck, leading_norm=leading_norm or index > 0),
                build_preact_branch(half, half, norm, bottleneck),
            )
            for index in range(int(changes_shape), blocks)
        )
        self.chain = ReversibleSequential(chain, store=store, grid_bits=grid_bits)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output in a new tensor."""
        if not hasattr(self, "first"):
            return self.chain(x)
        return self.chain(self.first(x) if self.chain.store or is_fx_proxy(x) else checkpoint(self.first, x))
