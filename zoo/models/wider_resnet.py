"""WiderResNet (Wu et al. 2016): few, wide pre-activation blocks; the plain form, and ``_a2`` for segmentation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any

from torch import nn

from zoo.config.options import Dilation, Dilations, StochasticDepth
from zoo.config.schema import ShouldBe
from zoo.layers.checkpointing import build_stage
from zoo.layers.conv import conv2d, max_pool
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.base import Network
from zoo.models.family import CHECKPOINTED, family

# Channels of the convolutions of a block in mod2 to mod7.
CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))
ONES = (1, 1, 1, 1, 1, 1)
STRUCTURES = {"16": (1, 1, 1, 1, 1, 1), "20": (1, 1, 1, 3, 1, 1), "38": (3, 3, 6, 3, 1, 1)}


class WiderResNetA2Options(StochasticDepth):
    """Options of the A2 variant of a WiderResNet."""

    dilation: Annotated[
        bool | Dilation | Dilations, ShouldBe("true, false, or the list [1, 1, 2, 2] for output stride 16")
    ] = False
    """Whether dilations of mod5 to mod7 replace strides, for output stride 8; [1, 1, 2, 2] (mod4 to mod7): output
    stride 16; set by output_stride."""


@family(
    "wider_resnet",
    {f"wider_resnet{depth}": {"structure": structure} for depth, structure in STRUCTURES.items()},
    options=StochasticDepth,
    memory=CHECKPOINTED,
    ignores_input_3x3=True,
)
class WiderResNet(Network):
    """``mod1`` (one 3x3 convolution), six modules ``mod2`` to ``mod7`` with pools between them, and ``bn_out``.

    Args:
    - `structure`: the number of blocks of each of the six modules.
    - `memory`: what is saved for backward. "auto": the outputs of the blocks' norms, and one byte per output of the
      pools. "checkpoint": the blocks' inputs; backward recomputes each block. "plain": like "auto", but with torch's
      pooling.
    - `num_pools`: the number of modules, from mod2 on, with a pool before them.
    - `strides`: the stride of the first block of each module.
    - `dilations`, `dropouts`: dilation and dropout of the blocks of each module.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        memory: str,
        num_pools: int = 5,
        strides: Sequence[int] = ONES,
        dilations: Sequence[int] = ONES,
        dropouts: Sequence[float] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ) -> None:
        super().__init__(features_only)
        self.mod1 = nn.Sequential(OrderedDict(conv1=conv2d(3, 64, 3)))
        self._add_stage("mod1", channels=64, reduction=1)
        in_channels, reduction = 64, 1
        settings = zip(structure, CHANNELS, strides, dilations, dropouts, strict=True)
        for number, (num_blocks, channels, stride, dilation, dropout) in enumerate(settings, start=2):
            names = [f"mod{number}"]
            if number < 2 + num_pools:
                names = [f"pool{number}", f"mod{number}"]
                self.add_module(f"pool{number}", max_pool(memory))
                reduction *= 2
            blocks = [IdentityResidualBlock(in_channels, channels, norm, stride, 1, dilation, dropout)]
            in_channels, reduction = channels[-1], reduction * stride
            for _ in range(num_blocks - 1):
                blocks.append(IdentityResidualBlock(in_channels, channels, norm, 1, 1, dilation, dropout))
            self.add_module(f"mod{number}", build_stage(blocks, memory))
            self._add_stage(*names, channels=in_channels, reduction=reduction)
        self.bn_out = out_of_place(norm(in_channels))
        self._add_classifier(num_classes)


@family(
    "wider_resnet_a2",
    {f"wider_resnet{depth}_a2": {"structure": structure} for depth, structure in STRUCTURES.items()},
    options=WiderResNetA2Options,
    memory=CHECKPOINTED,
    dilations={32: False, 16: [1, 1, 2, 2], 8: True},
    ignores_input_3x3=True,
)
class WiderResNetA2(WiderResNet):
    """WiderResNet with two pools, strides in mod4 to mod6 and channel dropout in mod6 (0.3) and mod7 (0.5).

    Args:
    - `dilation`: a boolean, as published; the number 1 also means False. True keeps the output at 1/8: mod5 and mod6
      lose their strides, mod5 is dilated by 2, mod6 and mod7 by 4. The list [1, 1, 2, 2], for mod4 to mod7, keeps it at
      1/16: mod6 loses its stride, mod6 and mod7 are dilated by 2.
    - All others: see `WiderResNet`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        dilation: bool | int | Sequence[int],
        **options: Any,
    ) -> None:
        strides, dilations = (1, 1, 2, 2, 2, 1), ONES
        if isinstance(dilation, (list, tuple)) and list(dilation) == [1, 1, 2, 2]:
            strides, dilations = (1, 1, 2, 2, 1, 1), (1, 1, 1, 1, 2, 2)
        elif dilation is True or (bool(dilation) and dilation != 1):
            strides, dilations = (1, 1, 2, 1, 1, 1), (1, 1, 1, 2, 4, 4)
        dropouts = (0.0, 0.0, 0.0, 0.0, 0.3, 0.5)
        super().__init__(
            norm, num_classes, num_pools=2, strides=strides, dilations=dilations, dropouts=dropouts, **options
        )
