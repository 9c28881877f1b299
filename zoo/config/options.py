"""Options that several families of networks share: sections, and types of settings. Does not import torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zoo.config.limits import MAX_BLOCKS, MAX_DILATION, MAX_GRID_BITS, MAX_LEVELS
from zoo.config.schema import ShouldBe
from zoo.config.section import Section

FOUR_MODULES = Field(min_length=4, max_length=4)
LEVELS = Field(min_length=1, max_length=MAX_LEVELS)
Dilation = Annotated[int, Field(ge=1, le=MAX_DILATION)]
Dilations = Annotated[list[Dilation], FOUR_MODULES]
ModuleDilation = Annotated[
    Dilation | Dilations, ShouldBe(f"a whole number from 1 to {MAX_DILATION}, or a list of four (mod2 to mod5)")
]
DropProbability = Annotated[float, Field(ge=0, le=0.99)]
Depths = Annotated[list[Annotated[int, Field(ge=0, le=MAX_BLOCKS)]], LEVELS]


class NoOptions(Section):
    """No options."""


class StemOptions(Section):
    """Option of families with two stems."""

    input_3x3: bool = False
    """Whether the stem is three 3x3 convolutions instead of one 7x7."""


class StochasticDepth(Section):
    """Option of families with residual blocks that save activations, and of reversible transformers."""

    drop_path_rate: DropProbability = 0.0
    """Stochastic depth: probability that the last block drops its branch for an image in training; rises linearly
    from 0 in the first block."""


class ReversibleOptions(Section):
    """Option of families with reversible blocks."""

    grid_bits: Annotated[int, Field(ge=0, le=MAX_GRID_BITS)] | None = None
    """Rounds activations of reversible chains to multiples of 2^-grid_bits, so that their reconstruction is exact."""
