"""WiderResNet (Wu et al. 2016): few and wide pre-activation blocks; plain, and the ``_a2`` form for segmentation.

Tested by tests/models/test_networks.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from zoo.layers.checkpointing import build_stage
from zoo.layers.conv import conv2d, max_pool
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.base import Network


class ModuleSettings(NamedTuple):
    """The settings of a module: a pool before it, and stride, dilation and dropout of its blocks."""

    pool: bool = False
    stride: int = 1  # of the first block
    dilation: int = 1
    dropout: float = 0.0


# For mod2 to mod7: the channels of a block's convolutions, then the settings of the three forms.
CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))
PLAIN = (*[ModuleSettings(pool=True)] * 5, ModuleSettings())
A2 = (
    ModuleSettings(pool=True),
    ModuleSettings(pool=True),
    ModuleSettings(stride=2),
    ModuleSettings(stride=2),
    ModuleSettings(stride=2, dropout=0.3),
    ModuleSettings(dropout=0.5),
)
A2_DILATED = (
    *A2[:3],
    ModuleSettings(dilation=2),
    ModuleSettings(dilation=4, dropout=0.3),
    ModuleSettings(dilation=4, dropout=0.5),
)
A2_STRIDE_16 = (*A2[:4], ModuleSettings(dilation=2, dropout=0.3), ModuleSettings(dilation=2, dropout=0.5))


class WiderResNet(Network):
    """``mod1`` (one 3x3 convolution), six modules ``mod2`` to ``mod7`` with pools between them, and ``bn_out``.

    Args:
    - `structure`: the number of blocks of each of the six modules.
    - `memory`: what is saved for backward. "auto": the outputs of the blocks' norms, and one byte per output of the
      pools. "checkpoint": the blocks' inputs; backward recomputes each block. "plain": like "auto", but with torch's
      pooling.
    - `modules`: the settings of the six modules.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        memory: str,
        modules: Sequence[ModuleSettings] = PLAIN,
    ) -> None:
        super().__init__(features_only)
        self.mod1 = nn.Sequential(OrderedDict(conv1=conv2d(3, 64, 3)))
        self._add_stage("mod1", channels=64, reduction=1)
        in_channels, reduction = 64, 1
        for number, num_blocks, channels, settings in zip(range(2, 8), structure, CHANNELS, modules, strict=True):
            names = [f"mod{number}"]
            if settings.pool:
                names = [f"pool{number}", f"mod{number}"]
                self.add_module(f"pool{number}", max_pool(memory))
                reduction *= 2
            blocks: OrderedDict[str, nn.Module] = OrderedDict()
            for index in range(1, num_blocks + 1):
                blocks[f"block{index}"] = IdentityResidualBlock(
                    in_channels,
                    channels,
                    norm,
                    stride=settings.stride if index == 1 else 1,
                    dilation=settings.dilation,
                    dropout=settings.dropout,
                )
                in_channels = channels[-1]
            reduction *= settings.stride
            self.add_module(f"mod{number}", build_stage(blocks, memory))
            self._add_stage(*names, channels=in_channels, reduction=reduction)
        self.bn_out = out_of_place(norm(in_channels))
        self._add_classifier(classes)


class WiderResNetA2(WiderResNet):
    """WiderResNet with two pools, strides in mod4 to mod6 and channel dropout in mod6 (0.3) and mod7 (0.5).

    Args:
    - `dilation`: a truth value, as published; the number 1 means False, too. True keeps the output at 1/8: mod5 and
      mod6 lose their strides, mod5 is dilated by 2, mod6 and mod7 by 4. The list [1, 1, 2, 2], of mod4 to mod7, keeps
      it at 1/16: mod6 loses its stride, mod6 and mod7 are dilated by 2.
    - All others: see `WiderResNet`.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        dilation: bool | int | Sequence[int],
        **options: Any,
    ) -> None:
        is_dilated = dilation is True or (bool(dilation) and dilation != 1)
        modules = A2_DILATED if is_dilated else A2
        if isinstance(dilation, (list, tuple)) and list(dilation) == [1, 1, 2, 2]:
            modules = A2_STRIDE_16
        super().__init__(norm, classes, modules=modules, **options)
