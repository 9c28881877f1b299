"""i-RevNets, whose pools can be undone too, so that the whole body is one chain (Jacobsen et al., ICLR 2018)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.conv import conv2d
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.reversible import PairPool, ReversibleBlock, ReversibleSequential, ShiftBlock
from zoo.models.network import Network
from zoo.models.revnext import LargestValueNetwork


class IRevNet(Network):
    """The original form for CIFAR: no stem; images are padded by zero channels; ``bn_out`` behind the chain.

    ``blocks`` has the number of one-branch blocks per level and ``widths`` the channels of their halves; the first
    block of each level but the first pools.  ``memory``: "auto" keeps the chain's output alone, "plain" what autograd
    keeps.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        features_only: bool = False,
        blocks: Sequence[int],
        widths: Sequence[int],
        dropout: float,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        _check_levels(blocks, widths)
        self.padding = 2 * widths[0] - 3
        channels = widths[0]
        for level, (depth, width) in enumerate(zip(blocks, widths, strict=True)):
            links = []
            for index in range(depth):
                stride = 2 if level > 0 and index == 0 else 1
                branch = build_shift_branch(channels, width, norm, stride, level > 0 or index > 0, dropout)
                links.append(ShiftBlock(branch, stride))
                channels = width
            self.add_module(f"level{level}", ReversibleSequential(links, store=memory == "plain"))
            self._add_stage(f"level{level}", channels=2 * channels, reduction=2**level)
        self.bn_out = out_of_place(norm(2 * channels))
        self._add_classifier(classes)

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        if stage == self._stages[0]:
            x = F.pad(x, (0, 0, 0, 0, 0, self.padding))
        return super()._run_stage(stage, x)


def build_shift_branch(
    in_channels: int, channels: int, norm: NormFactory, stride: int, leading_norm: bool, dropout: float
) -> nn.Sequential:
    """Return the branch of a block: three 3x3 convolutions, a quarter of the ``channels`` wide inside.

    The first of a network has no ``leading_norm``.  Source: the public code of Jacobsen et al. 2018.
    """
    inner = channels // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if leading_norm:
        layers["bn1"] = out_of_place(norm(in_channels))
    layers["conv1"] = conv2d(in_channels, inner, 3, stride=stride)
    layers["bn2"] = norm(inner)
    layers["conv2"] = conv2d(inner, inner, 3)
    layers["dropout"] = nn.Dropout(dropout)
    layers["bn3"] = norm(inner)
    layers["conv3"] = conv2d(inner, channels, 3)
    return nn.Sequential(layers)


def _check_levels(blocks: Sequence[int], widths: Sequence[int]) -> None:
    """Raise ConfigError unless each level has a block and four times the width of the one before, as its pool makes."""
    if (
        len(blocks) != len(widths)
        or min(blocks) < 1
        or min(widths) < 2
        or any(wide != 4 * width for width, wide in pairwise(widths))
    ):
        raise ConfigError(
            "each level needs a number of blocks, 1 or more, and a width, four times the one before; got blocks "
            f"{list(blocks)} and widths {list(widths)}"
        )


class TwoBranchIRevNet(LargestValueNetwork):
    """The form that Hascoet et al. 2023 compare with: stem, then one chain of reversible blocks and channel pools.

    ``blocks`` has the number of reversible blocks per level, ``channels`` those of the stem; a branch is twice 3x3
    convolution and norm.  171 MB of weights, as their totals ask for: blocks 2-2-2-1.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        features_only: bool = False,
        blocks: Sequence[int],
        channels: int,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.stem = nn.Sequential(conv2d(3, channels, 3), norm(channels))
        links: list[nn.Module] = []
        for level, depth in enumerate(blocks):
            if level > 0:
                links.append(PairPool())
                channels *= 4
            links += [build_two_branch_block(channels, norm) for _ in range(depth)]
        self.chain = ReversibleSequential(links, store=memory == "plain")
        self._add_stage("stem", "chain", channels=channels, reduction=2 ** (len(blocks) - 1))
        self._add_classifier(classes)


def build_two_branch_block(channels: int, norm: NormFactory) -> ReversibleBlock:
    """Return a block whose branches are twice 3x3 convolution and norm, of half the channels."""
    half = channels // 2
    f, g = (nn.Sequential(conv2d(half, half, 3), norm(half), conv2d(half, half, 3), norm(half)) for _ in "fg")
    return ReversibleBlock(f, g)
