"""ResNet v1 (He et al. 2016), stride on the 3x3 convolution of a bottleneck.

Tested by tests/models/test_networks.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from zoo.layers.conv import conv2d, max_pool
from zoo.layers.norm import NormFactory
from zoo.layers.residual import FUSE_BY_MEMORY, ResidualBlock, build_stage
from zoo.models.base import BlockDilation, Network, dilation_per_block


class ResNet(Network):
    """Stem ``mod1`` and four modules of post-activation residual blocks, ``mod2`` to ``mod5``.

    Args:
    - `structure`: the number of blocks of each of the four modules.
    - `bottleneck`: blocks of three convolutions, with four times as many channels outside, instead of two.
    - `dilation`: 1, or one entry per module, each a number or one number per block; an entry other than 1 (a list of
      ones included) removes the module's stride (for mod2: the stem's pooling).
    - `keep_outputs`: forward returns the list of the five modules' outputs and, with a classifier, the logits.
    - `memory`: what is saved for backward. "auto": the outputs of in-place norms; for the last norm of a block only the
      block's output, or both in half precision. "fused": only the block's output in half precision, too, if the scales
      of the last norms allow it (`ResidualBlock`). "checkpoint": the blocks' inputs; backward recomputes each block.
      "plain": the outputs of all norms and blocks, and the input of torch's pooling.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        structure: Sequence[int],
        bottleneck: bool,
        features_only: bool = False,
        dilation: int | Sequence[BlockDilation],
        keep_outputs: bool,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        dilations = dilation_per_block(dilation, structure)
        self.keep_outputs = keep_outputs
        stem: OrderedDict[str, nn.Module] = OrderedDict(conv1=conv2d(3, 64, 7, stride=2), bn1=norm(64))
        if dilations[0] == 1:
            stem["pool1"] = max_pool(memory)
        self.mod1 = nn.Sequential(stem)
        reduction = 4 if dilations[0] == 1 else 2
        self._add_stage("mod1", channels=64, reduction=reduction)
        in_channels = 64
        for index, (blocks, entry) in enumerate(zip(structure, dilations, strict=True)):
            width = 64 * 2**index
            channels = (width, width, 4 * width) if bottleneck else (width, width)
            stride = 2 if index > 0 and entry == 1 else 1
            module: OrderedDict[str, nn.Module] = OrderedDict()
            for block in range(1, blocks + 1):
                block_dilation = entry if isinstance(entry, int) else entry[block - 1]
                module[f"block{block}"] = ResidualBlock(
                    in_channels, channels, norm, stride if block == 1 else 1, block_dilation, FUSE_BY_MEMORY[memory]
                )
                in_channels = channels[-1]
            reduction *= stride
            self.add_module(f"mod{index + 2}", build_stage(module, memory))
            self._add_stage(f"mod{index + 2}", channels=in_channels, reduction=reduction)
        self._add_classifier(classes)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the logits, or with ``keep_outputs`` every module's output and the logits."""
        if not self.keep_outputs or self.features_only:
            return super().forward(x)
        outputs = self.forward_stages(x)
        return [*outputs, self.classifier(outputs[-1])] if hasattr(self, "classifier") else outputs
