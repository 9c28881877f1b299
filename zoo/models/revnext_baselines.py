"""The baselines of Hascoet et al. 2023 for RevNeXt: their variants of ResNet-18, RevNet and i-RevNet.

The totals in the paper determine the widths and depths. ResNet and RevNet have four levels of 32 to 256 channels,
constant within a level, with 12.5 MB of convolution weights, and three pools between levels; section 3.4 calls them
max-pooling. The paper does not state how these double the channels without weights; here zeros are added. The i-RevNet
has 171 MB of weights, which corresponds to 2, 2, 2 and 1 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zoo.config.options import ReversibleOptions
from zoo.layers.conv import MaxPool2d, conv2d
from zoo.layers.norm import NormFactory
from zoo.layers.reversible import PairPool, ReversibleBlock, ReversibleSequential
from zoo.layers.revnet_blocks import add_zero_channels
from zoo.models.family import family
from zoo.models.resnet import ResidualBlock
from zoo.models.revnext import GlobalMaxNetwork


@family(
    "revnext_baseline",
    {"revnext_resnet18": {"reversible": False, "blocks": (2, 2, 2, 2), "channels": 32, "grid_bits": None}},
    input="cifar",
)
@family(
    "revnext_baseline",
    {"revnext_revnet": {"reversible": True, "blocks": (4, 4, 4, 4), "channels": 32}},
    options=ReversibleOptions,
    input="cifar",
)
class RevNeXtBaseline(GlobalMaxNetwork):
    """ResNet-18 or RevNet of the paper: ``stem``, ``level0``, then levels of a `WideningPool` and blocks.

    Args:
    - `reversible`: use reversible blocks with two branches of two convolutions, instead of post-activation residual
      blocks of two convolutions.
    - `blocks`: the number of blocks of each level.
    - `channels`: channels of the stem and of the first level.
    - `grid_bits`: the grid of the reversible blocks, see `ReversibleSequential`; None for residual blocks.
    - `memory`: what is saved for backward. "auto": with reversible blocks the outputs of the levels (the stem is
      recomputed), otherwise the same as in `ResNet`. "plain": all activations.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        reversible: bool,
        blocks: Sequence[int],
        features_only: bool = False,
        channels: int,
        grid_bits: int | None,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.stem = nn.Sequential(conv2d(3, channels, 3), norm(channels))
        self.recomputed = ("stem",) if reversible and memory != "plain" else ()
        self._add_stage("stem", channels=channels, reduction=1)
        for level, depth in enumerate(blocks):
            modules: list[nn.Module] = []
            if level > 0:
                modules.append(WideningPool(channels, memory))
                channels *= 2
            if reversible:
                chain = [build_two_branch_block(channels, norm) for _ in range(depth)]
                modules.append(ReversibleSequential(chain, store=memory == "plain", grid_bits=grid_bits))
            else:
                modules += [ResidualBlock(channels, (channels, channels), norm, memory=memory) for _ in range(depth)]
            self.add_module(f"level{level}", nn.Sequential(*modules))
            self._add_stage(f"level{level}", channels=channels, reduction=2**level)
        self._add_classifier(num_classes)


class WideningPool(nn.Module):
    """2x2 max pooling, then zero channels that double the width, half of them before and half after the others.

    Saves one byte per output for backward; with ``memory`` "plain", torch's pooling is used.
    """

    def __init__(self, channels: int, memory: str) -> None:
        super().__init__()
        self.channels = channels
        self.pool = (nn.MaxPool2d if memory == "plain" else MaxPool2d)(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 2 C, H / 2, W / 2) of x (N, C, H, W); an odd last row or column is ignored."""
        return add_zero_channels(self.pool(x), self.channels)


@family(
    "irevnet_two_branch",
    {"irevnet_revnext": {"blocks": (2, 2, 2, 1), "channels": 32}},
    options=ReversibleOptions,
    input="cifar",
)
class TwoBranchIRevNet(GlobalMaxNetwork):
    """i-RevNet of the paper: ``stem``, then one ``chain`` of reversible blocks and channel pools.

    Args:
    - `blocks`: the number of reversible blocks of each level.
    - `channels`: channels of the stem; each pool multiplies them by four.
    - `grid_bits`: the grid of the chain, see `ReversibleSequential`.
    - `memory`: what is saved for backward. "auto": the output of the chain; the stem is recomputed. "plain": all
      activations.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        features_only: bool = False,
        blocks: Sequence[int],
        channels: int,
        grid_bits: int | None,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.stem = nn.Sequential(conv2d(3, channels, 3), norm(channels))
        self.recomputed = () if memory == "plain" else ("stem",)
        links: list[nn.Module] = []
        for level, depth in enumerate(blocks):
            if level > 0:
                links.append(PairPool())
                channels *= 4
            links += [build_two_branch_block(channels, norm) for _ in range(depth)]
        self.chain = ReversibleSequential(links, store=memory == "plain", grid_bits=grid_bits)
        self._add_stage("stem", "chain", channels=channels, reduction=2 ** (len(blocks) - 1))
        self._add_classifier(num_classes)


def build_two_branch_block(channels: int, norm: NormFactory) -> ReversibleBlock:
    """Build a block whose branches have two 3x3 convolutions of half the channels, each with a norm."""
    half = channels // 2
    f, g = (nn.Sequential(conv2d(half, half, 3), norm(half), conv2d(half, half, 3), norm(half)) for _ in "fg")
    return ReversibleBlock(f, g)
