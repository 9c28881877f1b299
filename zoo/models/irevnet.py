"""i-RevNet (Jacobsen et al., ICLR 2018). Its pooling is invertible, so the whole body is one reversible chain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from zoo.config.limits import MAX_BLOCKS, MAX_CHANNELS
from zoo.config.options import LEVELS, DropProbability, ReversibleOptions
from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.reversible import ReversibleSequential, ShiftBlock
from zoo.layers.revnet_blocks import build_preact_branch
from zoo.models.base import Network
from zoo.models.family import family
from zoo.ops.context import is_eager, is_fx_proxy

logger = logging.getLogger("zoo")


class IRevNetOptions(ReversibleOptions):
    """Options of an i-RevNet."""

    blocks: Annotated[list[Annotated[int, Field(ge=1, le=MAX_BLOCKS)]], LEVELS] = Field(default=[18, 18, 18])
    """Numbers of blocks, one per level."""
    width: Annotated[int, Field(ge=4, le=MAX_CHANNELS)] = 16
    """Channels of the half that a block changes in the first level; each further level has four times as many."""
    dropout: DropProbability = 0.1
    """Dropout probability in blocks."""


@family("irevnet", {"irevnet_cifar": {}}, options=IRevNetOptions, input="cifar")
class IRevNet(Network):
    """i-RevNet for CIFAR: images are padded with zero channels instead of a stem; ``bn_out`` follows the chain.

    In every level except the first, the first block pools.

    Args:
    - `blocks`: the number of `ShiftBlock`s of each level.
    - `width`: the channels of a half in the first level; each level has four times as many as the previous one.
    - `dropout`: dropout rate of the branches.
    - `grid_bits`: the grid of the chains, see `ReversibleSequential`.
    - `memory`: "auto" saves only the chain's output for backward, "plain" all activations.
    - All others: see `Network`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        features_only: bool = False,
        blocks: Sequence[int],
        width: int,
        dropout: float,
        grid_bits: int | None,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.padding = 2 * width - 3
        self.reconstructs_noise = memory != "plain" and grid_bits is None  # False after the warning
        channels = width
        for level, depth in enumerate(blocks):
            links = []
            for index in range(depth):
                stride = 2 if level > 0 and index == 0 else 1
                branch = build_preact_branch(
                    channels, width, norm, True, stride, level > 0 or index > 0, outer_size=3, dropout=dropout
                )
                links.append(ShiftBlock(branch, stride))
                channels = width
            chain = ReversibleSequential(links, store=memory == "plain", grid_bits=grid_bits)
            self.add_module(f"level{level}", chain)
            self._add_stage(f"level{level}", channels=2 * channels, reduction=2**level)
            width *= 4
        self.bn_out = out_of_place(norm(2 * channels))
        self._add_classifier(num_classes)

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        if stage == self._stages[0]:
            is_trained = self.training and torch.is_grad_enabled() and is_eager() and not is_fx_proxy(x)
            if self.reconstructs_noise and is_trained:
                self._warn_of_noise()
            x = F.pad(x, (0, 0, 0, 0, 0, self.padding))
        return super()._run_stage(stage, x)

    def _warn_of_noise(self) -> None:
        """Warn once that the padding's zeros are reconstructed as noise, and that norms amplify it."""
        self.reconstructs_noise = False
        logger.warning(
            "i-RevNet without grid_bits: backward reconstructs zeros beside the image with rounding errors, so that "
            "gradients of the first blocks are wrong; set grid_bits=14, which is exact, or memory='plain'"
        )
