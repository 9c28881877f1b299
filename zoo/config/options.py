"""Options of the families of networks: a section per family, whose fields are arguments of the family's class.

`zoo.config.architectures` names the section of each family. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WrapValidator
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

from zoo.config.limits import MAX_BLOCKS, MAX_CHANNELS, MAX_DILATION, MAX_GRID_BITS, MAX_LEVELS, MAX_SIDE
from zoo.config.section import Section


def _should_be(words: str) -> WrapValidator:
    """Return a validator that says what a value should be, in place of a message per member of a union."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"should be {words}") from None

    return WrapValidator(check)


_MODULES = Field(min_length=4, max_length=4)
Dilation = Annotated[int, Field(ge=1, le=MAX_DILATION)]
Dilations = Annotated[list[Dilation], _MODULES]
ModuleDilation = Annotated[
    Dilation | Dilations, _should_be(f"a whole number from 1 to {MAX_DILATION}, or a list of four (mod2 to mod5)")
]
BlockDilation = Annotated[
    Dilation
    | Annotated[list[Dilation | Annotated[list[Dilation], Field(min_length=1, max_length=MAX_BLOCKS)]], _MODULES],
    _should_be(
        f"a whole number from 1 to {MAX_DILATION}, or a list of four (mod2 to mod5), each a number or a list with a "
        "number per block"
    ),
]
DropProbability = Annotated[float, Field(ge=0, le=0.99)]
PoolingSide = Annotated[int, Field(gt=0, le=MAX_SIDE)]
_LEVELS = Field(min_length=1, max_length=MAX_LEVELS)
Depths = Annotated[list[Annotated[int, Field(ge=0, le=MAX_BLOCKS)]], _LEVELS]
Pools = Annotated[list[Literal["channel", "batch"]], Field(min_length=1, max_length=MAX_LEVELS - 1)]
EvenChannels = Annotated[int, Field(ge=2, le=MAX_CHANNELS, multiple_of=2)]


class StemOptions(Section):
    """The option of families with two stems."""

    input_3x3: bool = False
    """Whether the stem is three 3x3 convolutions instead of one 7x7."""


class StochasticDepth(Section):
    """The option of families of residual blocks whose activations are saved, and of reversible transformers."""

    drop_path_rate: DropProbability = 0.0
    """Stochastic depth: probability with which the last block drops its branch for an image in training; it rises
    linearly from 0 in the first block."""


class ResNetOptions(StochasticDepth):
    """Options of a ResNet."""

    dilation: ModuleDilation = 1
    """Dilations of mod2 to mod5, which replace strides: a number for all modules, or one per module ([1, 1, 2, 4]:
    output stride 8); set by output_stride."""


class ResNeXtOptions(StemOptions, ResNetOptions):
    """Options of a ResNeXt."""

    dilation: BlockDilation = 1  # type: ignore[assignment]
    """Dilations of mod2 to mod5, which replace strides: a number for all modules, or one per module ([1, 1, 2, 4]:
    output stride 8); set by output_stride. An entry may be a list with a number per block, which removes the module's
    stride even if all its numbers are 1."""


class WiderResNetA2Options(StochasticDepth):
    """Options of the A2 variant of a WiderResNet."""

    dilation: Annotated[
        bool | Dilation | Dilations, _should_be("true, false, or the list [1, 1, 2, 2] for output stride 16")
    ] = False
    """Whether dilations of mod5 to mod7 replace strides, for output stride 8; [1, 1, 2, 2] (mod4 to mod7): output
    stride 16; set by output_stride."""


class DenseNetOptions(StemOptions):
    """Options of a DenseNet."""

    dilation: ModuleDilation = 1
    """Dilations of mod2 to mod5, which replace the pools before these modules: a number for all
    modules, or one per module ([1, 1, 2, 4]: output stride 8); set by output_stride."""


class ReversibleOptions(Section):
    """The option of families of reversible blocks."""

    grid_bits: Annotated[int, Field(ge=0, le=MAX_GRID_BITS)] | None = None
    """Rounds activations of reversible chains to multiples of 2^-grid_bits, so that their reconstruction is exact."""


class RevViTOptions(StochasticDepth, ReversibleOptions):
    """Options of a reversible vision transformer."""


class RevBiFPNOptions(StochasticDepth, ReversibleOptions):
    """Options of a RevBiFPN."""

    norm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a batch in the running statistics of norms. 0.19 follows the authors' training, which updates them
    twice per batch with 0.1."""


class IRevNetOptions(ReversibleOptions):
    """Options of an i-RevNet."""

    blocks: Annotated[list[Annotated[int, Field(ge=1, le=MAX_BLOCKS)]], _LEVELS] = Field(default=[18, 18, 18])
    """Numbers of blocks, one per level."""
    width: Annotated[int, Field(ge=4, le=MAX_CHANNELS)] = 16
    """Channels of the half that a block changes in the first level; each level has four times as many as the previous
    one."""
    dropout: DropProbability = 0.1
    """Dropout probability in blocks."""


class InvertibleOptions(Section):
    """Options of both RevNeXts."""

    pools: Pools = Field(default=["channel", "channel"])
    """Kinds of the pools between the levels: channel moves the pixels of a window to channels, batch to the batch
    dimension."""
    channels: EvenChannels = 32
    """Channels of the stem, an even number."""
    eps_i: Annotated[float, Field(ge=0, le=1)] = 1e-4
    """Added to the absolute scales of invertible norms, so that all of them can be inverted."""


class RevNeXtOptions(InvertibleOptions):
    """Options of a RevNeXt, the hybrid form."""

    blocks: Depths = Field(default=[1, 2])
    """Numbers of blocks, one per pool, for the level after it."""
    units: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] = 2
    """Number of units of convolution, norm and leaky ReLU in a branch."""


class FlatRevNeXtOptions(InvertibleOptions):
    """Options of a RevNeXt, the layer-wise form."""

    layers: Depths = Field(default=[1, 1, 1])
    """Numbers of invertible layers, one per level; the stem is the first layer of the first level."""


class DeepLabOptions(Section):
    """Options of DeepLabV3."""

    output_stride: Literal[8, 16] = 8
    """Ratio of the resolutions of the image and of the feature map that the head reads, which sets the dilation of the
    body."""
    head_dilations: Annotated[list[Dilation], Field(min_length=3, max_length=3)] | None = None
    """Dilations of the head's three 3x3 convolutions; null: 12, 24, 36 with output_stride 8, and half of these with
    16."""
    pooling_size: (
        Annotated[
            PoolingSide | Annotated[list[PoolingSide], Field(min_length=2, max_length=2)],
            _should_be(f"a whole number from 1 to {MAX_SIDE}, or a list of two (rows, columns)"),
        ]
        | None
    ) = None
    """Window of the average pooling in the head's pooled branch in evaluation, in cells of the feature map: a number,
    or rows and columns; null: the whole map. In training, the branch averages over the whole crop."""


class DeepLabStemOptions(StemOptions, DeepLabOptions):
    """Options of DeepLabV3 on a body with two stems."""
