"""Stages of residual blocks: plain or checkpointed, as the option ``memory`` says."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from zoo.layers.checkpointing import checkpoint
from zoo.ops.context import is_fx_proxy

# The option ``memory`` -> the argument ``fuse`` of `ResidualBlock`.
FUSE_BY_MEMORY = {"plain": "never", "auto": "auto", "fused": "always", "checkpoint": "auto"}


def build_stage(blocks: OrderedDict[str, nn.Module], memory: str) -> nn.Sequential:
    """Return the residual blocks as one module that runs them in order."""
    return CheckpointedSequential(blocks) if memory == "checkpoint" else nn.Sequential(blocks)


class CheckpointedSequential(nn.Sequential):
    """Sequence of checkpointed modules: saves only their inputs and recomputes each in backward, see `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the last module's output."""
        for module in self:
            x = module(x) if is_fx_proxy(x) else checkpoint(module, x)
        return x
