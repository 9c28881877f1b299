"""Drop-in replacements for torch's norm layers, reversible chains, and the building blocks of the networks."""

from zoo.layers.checkpointing import checkpoint
from zoo.layers.deeplab_head import DeeplabV3
from zoo.layers.init import init_weights
from zoo.layers.norm import (
    ABN,
    InPlaceABN,
    InPlaceABNSync,
    active_group,
    freeze_norms,
    norm_act,
    set_active_group,
)
from zoo.layers.reversible import ReversibleBlock, ReversibleSequential
from zoo.ops.abn.functional import inplace_abn, inplace_abn_sync

__all__ = [
    "ABN",
    "DeeplabV3",
    "InPlaceABN",
    "InPlaceABNSync",
    "ReversibleBlock",
    "ReversibleSequential",
    "active_group",
    "checkpoint",
    "freeze_norms",
    "init_weights",
    "inplace_abn",
    "inplace_abn_sync",
    "norm_act",
    "set_active_group",
]
