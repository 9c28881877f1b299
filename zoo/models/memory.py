"""What networks keep for backward: the option ``memory`` of the residual families."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from zoo.layers.stages import CheckpointedSequential, UnwoundSequential

# memory -> whether a post-activation block's last norm adds and activates, in the words of ResidualBlock
FUSE = {"plain": "never", "fused": "always"}


def build_stage(blocks: OrderedDict[str, nn.Module], memory: str) -> nn.Sequential:
    """Return the residual blocks as one module that runs them in order."""
    if memory == "checkpoint":
        return CheckpointedSequential(blocks)
    if memory in ("unwind", "unwind_3x3"):
        return UnwoundSequential(blocks, redo_3x3=memory == "unwind_3x3")
    return nn.Sequential(blocks)
