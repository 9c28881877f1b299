"""Pre-activation ResNets, the counterparts of the RevNets (Gomez et al. 2017, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from zoo.config.options import StochasticDepth
from zoo.layers.checkpointing import build_stage
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.revnet_blocks import PreactBlock, build_preact_stem, with_paper_statistics
from zoo.models.base import Network
from zoo.models.family import CHECKPOINTED, family


class ModuleShape(NamedTuple):
    """Blocks of one resolution. The first block changes channels and stride, and may lack a leading norm."""

    in_channels: int
    out_channels: int
    bottleneck: bool
    blocks: int
    stride: int
    leading_norm: bool


class PreactNetwork(Network):
    """Base class: stem ``mod1``, modules of pre-activation blocks from ``mod2`` on, last norm ``bn_out``.

    Networks of four modules are for ImageNet, with a 7x7 convolution of stride 2 and a pool in the stem. Networks of
    three modules are for CIFAR. Norms have the paper's eps of 1e-3 and momentum of 0.01.

    Args:
    - `structure`: the number of blocks of each module.
    - `widths`: channels of the stem and of the modules; with ``bottleneck``, modules have four times as many.
    - `bottleneck`: residual functions of three convolutions instead of two.
    - `memory`: what is saved for backward, see the subclasses.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        structure: Sequence[int],
        widths: Sequence[int],
        bottleneck: bool,
        features_only: bool = False,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        norm = with_paper_statistics(norm)
        imagenet = len(structure) == 4
        self.mod1 = build_preact_stem(widths[0], norm, imagenet, memory)
        in_channels, reduction = widths[0], 4 if imagenet else 1
        self._add_stage("mod1", channels=in_channels, reduction=reduction)
        for index, (blocks, width) in enumerate(zip(structure, widths[1:], strict=True)):
            out_channels, stride = 4 * width if bottleneck else width, 2 if index > 0 else 1
            shape = ModuleShape(in_channels, out_channels, bottleneck, blocks, stride, leading_norm=index > 0)
            self.add_module(f"mod{index + 2}", self._build_module(shape, norm, memory))
            in_channels, reduction = out_channels, reduction * stride
            self._add_stage(f"mod{index + 2}", channels=in_channels, reduction=reduction)
        self.bn_out = out_of_place(norm(in_channels))
        self._add_classifier(num_classes)

    def _build_module(self, shape: ModuleShape, norm: NormFactory, memory: str) -> nn.Module:
        """Build the blocks of one resolution."""
        raise NotImplementedError


@family(
    "preact",
    {
        "resnet32_cifar": {"structure": (5, 5, 5), "widths": (16, 16, 32, 64), "bottleneck": False},
        "resnet110_cifar": {"structure": (18, 18, 18), "widths": (16, 16, 32, 64), "bottleneck": False},
        "resnet164_cifar": {"structure": (18, 18, 18), "widths": (16, 16, 32, 64), "bottleneck": True},
    },
    options=StochasticDepth,
    memory=CHECKPOINTED,
    input="cifar",
)
@family(
    "preact",
    {"resnet101_preact": {"structure": (3, 4, 23, 3), "widths": (64, 64, 128, 256, 512), "bottleneck": True}},
    options=StochasticDepth,
    memory=CHECKPOINTED,
)
class PreactResNet(PreactNetwork):
    """Pre-activation ResNet, with modules of `PreactBlock`s.

    ``memory`` selects what is saved for backward. "auto": the outputs of the norms, also their inputs if they are not
    in-place, and one byte per output of the pool. "checkpoint": the blocks' inputs; backward recomputes each block.
    "plain": like "auto", but with torch's pooling.
    """

    def _build_module(self, shape: ModuleShape, norm: NormFactory, memory: str) -> nn.Module:
        in_channels, out_channels, bottleneck, num_blocks, stride, leading_norm = shape
        blocks = [PreactBlock(in_channels, out_channels, norm, bottleneck, stride, leading_norm)]
        blocks += [PreactBlock(out_channels, out_channels, norm, bottleneck) for _ in range(num_blocks - 1)]
        return build_stage(blocks, memory)
