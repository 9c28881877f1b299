"""RevNeXt: networks of invertible layers, with or without reversible blocks around them (Hascoet et al. 2023).

The body is one chain, from the images to the features of the classifier. Only its last map is saved for backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from zoo.config.limits import MAX_BLOCKS, MAX_CHANNELS, MAX_LEVELS
from zoo.config.options import Depths
from zoo.config.section import Section
from zoo.errors import ConfigError
from zoo.layers.conv import uninitialized
from zoo.layers.invertible import (
    BatchPool,
    BypassedLayerError,
    ChannelPool,
    GlobalMax,
    Invertible,
    InvertibleConv,
    InvertibleLeakyReLU,
    InvertibleNorm,
    LayerwiseBlock,
    Stem,
)
from zoo.layers.norm import ABN, NormFactory
from zoo.models.base import Network
from zoo.models.family import family
from zoo.ops.chain import ErrorCallback, run_chain

POOLS: dict[str, type[Invertible]] = {"channel": ChannelPool, "batch": BatchPool}
Pools = Annotated[list[Literal["channel", "batch"]], Field(min_length=1, max_length=MAX_LEVELS - 1)]
EvenChannels = Annotated[int, Field(ge=2, le=MAX_CHANNELS, multiple_of=2)]


class InvertibleOptions(Section):
    """Options of both RevNeXts."""

    pools: Pools = Field(default=["channel", "channel"])
    """Pools between the levels: "channel" moves the pixels of a window to channels, "batch" to the batch dimension."""
    channels: EvenChannels = 32
    """Channels of the stem, an even number."""
    eps_i: Annotated[float, Field(ge=0, le=1)] = 1e-4
    """Added to the absolute scales of invertible norms, so that all of them can be inverted."""


class RevNeXtOptions(InvertibleOptions):
    """Options of a RevNeXt in its hybrid form."""

    blocks: Depths = Field(default=[1, 2])
    """Numbers of blocks of the levels after each pool."""
    units: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] = 2
    """Number of units of convolution, norm and leaky ReLU in a branch."""


class FlatRevNeXtOptions(InvertibleOptions):
    """Options of a RevNeXt in its layer-wise form."""

    layers: Depths = Field(default=[1, 1, 1])
    """Numbers of invertible layers, one per level; the stem is the first layer of the first level."""


class ScaledLinear(nn.Linear):
    """Linear layer without bias whose output is multiplied by 1/8, as in the authors' code."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return 0.125 * super().forward(x)


class GlobalMaxNetwork(Network):
    """Base class of the paper's networks, which pool the last map by global max pooling."""

    poolings = ("max", "")
    images_per_input = 1  # images in the last map per input image; each batch pool multiplies it by 4

    def _add_classifier(self, num_classes: int) -> None:
        if self.features_only:
            return
        pool = GlobalMax(self.images_per_input)
        if num_classes > 0:
            fc = uninitialized(ScaledLinear, self.num_features, num_classes, bias=False)
            self.classifier = nn.Sequential(OrderedDict(max_pool=pool, fc=fc))
        else:
            self.global_pool = pool


class InvertibleNetwork(GlobalMaxNetwork):
    """Base class of both forms: levels of invertible layers, ``level0`` after the stem, each other level after a pool.

    Args:
    - `num_classes`: number of classes; 0 for no classifier.
    - `depths`: one number per level, passed to ``build_level``.
    - `pools`: one entry per downsampling; "channel" turns each 2x2 window into channels, "batch" into images.
    - `channels`: channels of the stem.
    - `build_level`: function (index of the level, channels, depth) -> the layers after its stem or pool.
    - `features_only`: omit the classifier; forward returns the list of the levels' outputs.
    - `memory`: "auto" saves the last map for backward and reconstructs all others, "plain" saves all activations.

    Attributes:
    - `meter`: the meter of `run_chain`, called with the index of a layer (0 for the stem), or None.
    """

    def __init__(
        self,
        num_classes: int,
        depths: Sequence[int],
        pools: Sequence[str],
        channels: int,
        build_level: Callable[[int, int, int], list[Invertible]],
        features_only: bool,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        _check_levels(depths, pools)
        self.store = memory == "plain"
        self.meter: ErrorCallback | None = None
        self.images_per_input = 4 ** list(pools).count("batch")
        for level, depth in enumerate(depths):
            first: Invertible = Stem(channels) if level == 0 else POOLS[pools[level - 1]]()
            channels *= 4 if isinstance(first, ChannelPool) else 1
            self.add_module(f"level{level}", nn.Sequential(first, *build_level(level, channels, depth)))
            self._add_stage(f"level{level}", channels=channels, reduction=2**level)
        self._add_classifier(num_classes)

    def layers(self) -> list[nn.Module]:
        """Return the layers up to the last map, in order."""
        return [layer for (stage,) in self._stages for layer in self.get_submodule(stage).children()]

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the logits (N, classes), or without classifier the maximum of each channel (N, num_features).

        With ``features_only``, return the list of the levels' outputs.
        """
        if self.features_only:
            return self.forward_stages(x)
        if hasattr(self, "classifier"):
            max_pool, fc = self.classifier
            return fc(self._run([*self.layers(), max_pool], x))
        pool = [] if isinstance(self.global_pool, nn.Identity) else [self.global_pool]
        return self._run([*self.layers(), *pool], x)

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        return self._run(list(self.get_submodule(stage[0]).children()), x)

    def _run(self, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        try:
            return run_chain(layers, x, store=self.store, meter=self.meter)[0]
        except BypassedLayerError as error:
            raise error.within(self) from None


@family("revnext_flat", {"revnext_flat": {}}, options=FlatRevNeXtOptions, input="cifar")
class FlatRevNeXt(InvertibleNetwork):
    """The layer-wise form: units of invertible convolution, norm and leaky ReLU, without reversible blocks.

    Reconstruction errors grow exponentially with the number of units. At slope 0.2, the authors' networks with up to 7
    units train as well as with stored activations; networks with 8 or more collapse. In short runs of this
    implementation, 9 units trained and 12 diverged.

    Args:
    - `norm`: function channels -> norm with leaky ReLU.
    - `layers`: the number of units of each level. The stem counts as one, so the first number is at least 1.
    - `eps_i`: the smallest gain of the norms, see `InvertibleNorm`.
    - All others: see `InvertibleNetwork`.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        features_only: bool = False,
        layers: Sequence[int],
        pools: Sequence[str],
        channels: int,
        eps_i: float,
        memory: str,
    ) -> None:
        def build_level(level: int, channels: int, depth: int) -> list[Invertible]:
            stem = _norm_act(channels, norm, eps_i) if level == 0 else []
            return stem + _units(channels, depth - (level == 0), norm, eps_i)

        super().__init__(num_classes, layers, pools, channels, build_level, features_only, memory)


@family("revnext", {"revnext": {}}, options=RevNeXtOptions, input="cifar")
class RevNeXt(InvertibleNetwork):
    """The hybrid form: reversible blocks whose branches are units of invertible convolution, norm and leaky ReLU.

    The first level has one block with one unit per branch. The paper does not state pools and depths; the defaults are
    the networks of the authors' error study, with 2,446,048 parameters for 10 classes.

    Args:
    - `norm`: function channels -> norm with leaky ReLU.
    - `blocks`: the number of blocks of each level after a pool.
    - `units`: the number of units of a branch in these blocks.
    - `eps_i`: the smallest gain of the norms, see `InvertibleNorm`.
    - All others: see `InvertibleNetwork`.

    Bytes per pixel in float32, with 32 ``channels`` and the C++ kernels: 128 for the map, 128 for its gradient, 64 for
    the map inside a branch, 64 for its gradient and 16 of scratch memory, 400 in total. (The paper's 352 bytes omit the
    gradient inside the branch, and have 32 bytes for the convolution there.)
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        features_only: bool = False,
        blocks: Sequence[int],
        units: int,
        pools: Sequence[str],
        channels: int,
        eps_i: float,
        memory: str,
    ) -> None:
        def block(channels: int, depth: int) -> Invertible:
            return LayerwiseBlock(*(_units(channels // 2, depth, norm, eps_i) for _ in "fg"))

        def build_level(level: int, channels: int, depth: int) -> list[Invertible]:
            if level == 0:
                return [*_norm_act(channels, norm, eps_i), block(channels, 1)]
            return [block(channels, units) for _ in range(depth)]

        if len(blocks) != len(pools):
            raise ConfigError(f"blocks must have one number for each of the {len(pools)} pools, got {list(blocks)}")
        super().__init__(num_classes, (1, *blocks), pools, channels, build_level, features_only, memory)


def _units(channels: int, number: int, norm: NormFactory, eps_i: float) -> list[Invertible]:
    """Build ``number`` units of invertible convolution, norm and leaky ReLU."""
    layers: list[Invertible] = []
    for _ in range(number):
        layers += [InvertibleConv(channels), *_norm_act(channels, norm, eps_i)]
    return layers


def _norm_act(channels: int, norm: NormFactory, eps_i: float) -> list[Invertible]:
    """Build an invertible norm and leaky ReLU. Raises ConfigError for norms without an inverse."""
    layer: Any = norm(channels)
    if not isinstance(layer, ABN) or layer.activation != "leaky_relu":
        raise ConfigError(
            "invertible networks need the norms 'standard', 'inplace' or 'sync' with activation leaky_relu, got "
            f"{type(layer).__name__} with {getattr(layer, 'activation', 'no activation')}"
        )
    return [InvertibleNorm(layer, eps_i), InvertibleLeakyReLU(layer.activation_param)]


def _check_levels(depths: Sequence[int], pools: Sequence[str]) -> None:
    """Raise ConfigError unless there is one depth per level."""
    if len(depths) != len(pools) + 1 or min(depths) < 0 or depths[0] < 1:
        raise ConfigError(f"{len(pools)} pools need {len(pools) + 1} depths, the first of at least 1; got {depths}")
