"""What networks keep for backward: the option ``memory`` of the residual families."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from zoo.config.network import MEMORY, NEEDS_INPLACE
from zoo.errors import ConfigError
from zoo.layers.norm import InPlaceABN, InPlaceABNSync
from zoo.layers.stages import CheckpointedSequential, UnwoundSequential

# memory -> whether a post-activation block's last norm adds and activates, in the words of ResidualBlock
FUSE = {"plain": "never", "fused": "always"}


def check_memory(memory: Any, family: str, norm: Any) -> None:
    """Raise ConfigError unless the family has this way to save memory and the norm, one of the network's, fits it."""
    if memory not in MEMORY[family]:
        raise ConfigError(f"memory must be one of {', '.join(MEMORY[family])}, got {memory!r}")
    if memory in NEEDS_INPLACE and type(norm) not in (InPlaceABN, InPlaceABNSync):
        raise ConfigError(
            f"memory={memory!r} needs norms that work in place, not {type(norm).__name__}; build the network with "
            'norm="inplace" or "sync", or with memory="auto"'
        )


def build_stage(blocks: OrderedDict[str, nn.Module], memory: str) -> nn.Sequential:
    """Return the residual blocks as one module that runs them in order."""
    if memory == "checkpoint":
        return CheckpointedSequential(blocks)
    if memory in ("unwind", "unwind_3x3"):
        return UnwoundSequential(blocks, redo_3x3=memory == "unwind_3x3")
    return nn.Sequential(blocks)
