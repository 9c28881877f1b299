"""The ordinary networks that Hascoet et al. 2023 compare RevNeXt with: like ResNet-18, and a RevNet of its weights.

The paper's totals fix widths and depths: four levels of 32 to 256 channels of constant width, so that the weights of
the convolutions are 12.5 MB, and three pools in between, which section 3.4 calls max-pooling.  How these double the
channels without weights it does not say; here zeros are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers.conv import conv2d
from zoo.layers.ends import MaxPool2d
from zoo.layers.norm import NormFactory
from zoo.layers.residual import ResidualBlock
from zoo.layers.reversible import ReversibleSequential
from zoo.models.irevnet import build_two_branch_block
from zoo.models.memory import FUSE
from zoo.models.revnext import LargestValueNetwork


class RevNeXtTwin(LargestValueNetwork):
    """``stem``, ``level0``, then per level a `WideningPool` and blocks.

    Blocks are post-activation residual ones of two convolutions, or if ``reversible`` of two branches of two.
    ``memory``: "auto" keeps the input and output of each level where they are reversible, and of the others what
    `ResNet` keeps; "plain" keeps what autograd keeps.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        reversible: bool,
        blocks: Sequence[int],
        features_only: bool = False,
        channels: int,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        build = _build_reversible if reversible else _build_residual
        self.stem = nn.Sequential(conv2d(3, channels, 3), norm(channels))
        self._add_stage("stem", channels=channels, reduction=1)
        for level, depth in enumerate(blocks):
            pool = [WideningPool(channels, memory)] if level > 0 else []
            channels *= 2 if level > 0 else 1
            self.add_module(f"level{level}", nn.Sequential(*pool, *build(channels, depth, norm, memory)))
            self._add_stage(f"level{level}", channels=channels, reduction=2**level)
        self._add_classifier(classes)


class WideningPool(nn.Module):
    """Maxima of 2x2 windows, then as many channels of zeros as there were, one half of them before and one behind.

    Backward keeps one byte per maximum, and with ``memory`` "plain" what torch's own pooling keeps.
    """

    def __init__(self, channels: int, memory: str) -> None:
        super().__init__()
        self.before, self.behind = channels // 2, channels - channels // 2
        self.pool = (nn.MaxPool2d if memory == "plain" else MaxPool2d)(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 2 C, H / 2, W / 2) of x (N, C, H, W); a last odd row or column is left out."""
        return F.pad(self.pool(x), (0, 0, 0, 0, self.before, self.behind))


def _build_residual(channels: int, depth: int, norm: NormFactory, memory: str) -> list[nn.Module]:
    fuse = FUSE.get(memory, "auto")
    return [ResidualBlock(channels, (channels, channels), norm, fuse=fuse) for _ in range(depth)]


def _build_reversible(channels: int, depth: int, norm: NormFactory, memory: str) -> list[nn.Module]:
    links = [build_two_branch_block(channels, norm) for _ in range(depth)]
    return [ReversibleSequential(links, store=memory == "plain")]
