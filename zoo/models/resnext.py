"""Pre-activation ResNeXt with 64 groups ("64x2d"; the ResNeXt paper has 32x4d and 64x4d)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from zoo.config.limits import MAX_BLOCKS, MAX_DILATION
from zoo.config.options import FOUR_MODULES, Dilation, StemOptions
from zoo.config.schema import ShouldBe
from zoo.layers.checkpointing import build_stage
from zoo.layers.conv import build_stem
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.base import Network, dilation_per_module
from zoo.models.family import CHECKPOINTED, family
from zoo.models.resnet import DILATIONS, ResNetOptions

GROUPS = 64
BlockDilation = Annotated[
    Dilation
    | Annotated[list[Dilation | Annotated[list[Dilation], Field(min_length=1, max_length=MAX_BLOCKS)]], FOUR_MODULES],
    ShouldBe(
        f"a whole number from 1 to {MAX_DILATION}, or a list of four (mod2 to mod5), each a number or a list with a "
        "number per block"
    ),
]


class ResNeXtOptions(StemOptions, ResNetOptions):
    """Options of a ResNeXt."""

    dilation: BlockDilation = 1  # type: ignore[assignment]
    """Dilations of mod2 to mod5. They replace strides: a number for all modules, or one per module ([1, 1, 2, 4]:
    output stride 8); set by output_stride. An entry may be a list with a number per block; it removes the module's
    stride even if all its numbers are 1."""


@family(
    "resnext",
    {
        "resnext50": {"structure": (3, 4, 6, 3)},
        "resnext101": {"structure": (3, 4, 23, 3)},
        "resnext152": {"structure": (3, 8, 36, 3)},
    },
    options=ResNeXtOptions,
    memory=CHECKPOINTED,
    dilations=DILATIONS,
)
class ResNeXt(Network):
    """Stem ``mod1``, four modules of pre-activation bottlenecks ``mod2`` to ``mod5``, last norm ``bn_out``.

    Args:
    - `structure`: the number of blocks of each of the four modules.
    - `input_3x3`: make the stem of three 3x3 convolutions instead of one 7x7.
    - `dilation`: a number for all modules, or an entry per module: a number for its blocks, or one per block. An entry
      other than the number 1, even a list of ones, removes the module's stride.
    - `memory`: what is saved for backward. "auto": the outputs of the blocks' norms, and one byte per output of the
      pool. "checkpoint": the blocks' inputs; backward recomputes each block. "plain": like "auto", but with torch's
      pooling.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        input_3x3: bool,
        dilation: int | Sequence[int | Sequence[int]],
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.mod1 = build_stem(64, norm, input_3x3, memory)
        self._add_stage("mod1", channels=64, reduction=4)
        in_channels, reduction = 64, 4
        for index, (blocks, entry) in enumerate(zip(structure, dilation_per_module(dilation), strict=True)):
            width = 128 * 2**index
            stride = 2 if index > 0 and entry == 1 else 1
            channels = (width, width, 2 * width)
            first, *others = [entry] * blocks if isinstance(entry, int) else entry
            module = [IdentityResidualBlock(in_channels, channels, norm, stride, GROUPS, first)]
            in_channels, reduction = channels[-1], reduction * stride
            for block_dilation in others:
                module.append(IdentityResidualBlock(in_channels, channels, norm, 1, GROUPS, block_dilation))
            self.add_module(f"mod{index + 2}", build_stage(module, memory))
            self._add_stage(f"mod{index + 2}", channels=in_channels, reduction=reduction)
        self.bn_out = out_of_place(norm(in_channels))
        self._add_classifier(num_classes)
