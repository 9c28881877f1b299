"""Pre-activation ResNeXt with 64 groups ("64x2d"; the ResNeXt paper has 32x4d and 64x4d).

Tested by tests/models/test_networks.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from zoo.layers.checkpointing import build_stage
from zoo.layers.conv import build_stem
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.residual import IdentityResidualBlock
from zoo.models.base import Network, dilation_per_module

GROUPS = 64


class ResNeXt(Network):
    """Stem ``mod1``, four modules of pre-activation bottlenecks ``mod2`` to ``mod5``, last norm ``bn_out``.

    Args:
    - `structure`: the number of blocks of each of the four modules.
    - `input_3x3`: make the stem of three 3x3 convolutions instead of one 7x7.
    - `dilation`: a number for all modules, or one per module. A number other than 1 removes the module's stride.
    - `memory`: what is saved for backward. "auto": the outputs of the blocks' norms, and one byte per output of the
      pool. "checkpoint": the blocks' inputs; backward recomputes each block. "plain": like "auto", but with torch's
      pooling.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        structure: Sequence[int],
        features_only: bool = False,
        input_3x3: bool,
        dilation: int | Sequence[int],
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.mod1 = build_stem(64, norm, input_3x3, memory)
        self._add_stage("mod1", channels=64, reduction=4)
        in_channels, reduction = 64, 4
        dilations = dilation_per_module(dilation)
        for index, (blocks, module_dilation) in enumerate(zip(structure, dilations, strict=True)):
            width = 128 * 2**index
            stride = 2 if index > 0 and module_dilation == 1 else 1
            channels = (width, width, 2 * width)
            module = [IdentityResidualBlock(in_channels, channels, norm, stride, GROUPS, module_dilation)]
            in_channels, reduction = channels[-1], reduction * stride
            for _ in range(blocks - 1):
                module.append(IdentityResidualBlock(in_channels, channels, norm, 1, GROUPS, module_dilation))
            self.add_module(f"mod{index + 2}", build_stage(module, memory))
            self._add_stage(f"mod{index + 2}", channels=in_channels, reduction=reduction)
        self.bn_out = out_of_place(norm(in_channels))
        self._add_classifier(classes)
