"""i-RevNet (Jacobsen et al., ICLR 2018). Its pooling is invertible, so the whole body is one reversible chain.

Tested by tests/models/test_revnext.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.layers.norm import NormFactory, out_of_place
from zoo.layers.reversible import ReversibleSequential, ShiftBlock
from zoo.layers.revnet_blocks import build_preact_branch
from zoo.models.base import Network
from zoo.models.family import family
from zoo.ops.context import is_eager, is_fx_proxy

logger = logging.getLogger("zoo")


@family("irevnet")
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
        classes: int,
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
        self.reconstructs_noise = memory != "plain" and grid_bits is None  # False once a warning has said so
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
        self._add_classifier(classes)

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        if stage == self._stages[0]:
            is_trained = self.training and torch.is_grad_enabled() and is_eager() and not is_fx_proxy(x)
            if self.reconstructs_noise and is_trained:
                self._warn_of_noise()
            x = F.pad(x, (0, 0, 0, 0, 0, self.padding))
        return super()._run_stage(stage, x)

    def _warn_of_noise(self) -> None:
        """Warn once that the reconstruction of the padding's zeros is noise, which norms amplify."""
        self.reconstructs_noise = False
        logger.warning(
            "i-RevNet without grid_bits: backward reconstructs zeros beside the image with rounding errors, so that "
            "gradients of the first blocks are wrong; set grid_bits=14, which is exact, or memory='plain'"
        )
