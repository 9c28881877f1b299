"""Networks that are undone layer by layer, with and without reversible blocks around the layers (Hascoet et al. 2023).

The body is one chain, from the images to the features that the classifier reads: backward keeps its last map.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.conv import uninitialised
from zoo.layers.invertible import (
    BatchPool,
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
from zoo.models.network import Network
from zoo.ops.chain import Meter, run_chain

POOLS: dict[str, type[Invertible]] = {"channel": ChannelPool, "batch": BatchPool}


class ScaledLinear(nn.Linear):
    """Linear layer without bias whose output is multiplied by 1/8, as in the authors' code."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return 0.125 * super().forward(x)


class LargestValueNetwork(Network):
    """Base of the paper's networks: the classifier reads the largest value of each channel.

    An image of the input has ``images`` in the last map.
    """

    images = 1

    def _add_classifier(self, classes: int) -> None:
        if classes > 0 and not self.features_only:
            fc = uninitialised(ScaledLinear, self.num_features, classes, bias=False)
            self.classifier = nn.Sequential(OrderedDict(max_pool=GlobalMax(self.images), fc=fc))


class InvertibleNetwork(LargestValueNetwork):
    """Levels of invertible layers, ``level0`` with the stem, the others with a pool first; largest values; classifier.

    ``pools`` has a word for each pool: "channel" makes the windows channels, "batch" images (`zoo.ops.undo`),
    of which the last map then has ``images`` for each one of the input.  ``channels`` are those of the stem.
    ``build`` makes the layers of a level behind the pool from its number, channels and depth.  ``memory``: "auto" keeps
    the last map and finds all others again, "plain" keeps what autograd keeps.  ``meter`` is that of `run_chain`: it is
    called with the number of a layer from the stem on.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        depths: Sequence[int],
        pools: Sequence[str],
        channels: int,
        build: Callable[[int, int, int], list[Invertible]],
        features_only: bool,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        _check_levels(depths, pools)
        self.store = memory == "plain"
        self.meter: Meter | None = None
        self.images = 4 ** list(pools).count("batch")
        for level, depth in enumerate(depths):
            first: Invertible = Stem(channels) if level == 0 else POOLS[pools[level - 1]]()
            channels *= 4 if isinstance(first, ChannelPool) else 1
            self.add_module(f"level{level}", nn.Sequential(first, *build(level, channels, depth)))
            self._add_stage(f"level{level}", channels=channels, reduction=2**level)
        self._add_classifier(classes)

    def layers(self) -> list[nn.Module]:
        """Return the layers up to the last map, in order."""
        return [layer for (stage,) in self._stages for layer in self.get_submodule(stage).children()]

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the logits (N, classes); the last map without a classifier; the levels with ``features_only``."""
        if not hasattr(self, "classifier"):
            return super().forward(x)
        max_pool, fc = self.classifier
        return fc(self._run([*self.layers(), max_pool], x))

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        return self._run(list(self.get_submodule(stage[0]).children()), x)

    def _run(self, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        return run_chain(layers, x, store=self.store, meter=self.meter)[0]


class FlatRevNeXt(InvertibleNetwork):
    """The layer-wise form: ``layers`` units of invertible convolution, norm and leaky ReLU per level.

    The stem counts as one, so that the first number is at least 1.  Errors of the reconstruction grow exponentially
    with the number of units.  At slope 0.2 the authors' networks train as well as stored ones with up to 7 units, and
    collapse from 8 on; of ours, in short runs, 9 units trained and 12 diverged.
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        features_only: bool = False,
        layers: Sequence[int],
        pools: Sequence[str],
        channels: int,
        eps_i: float,
        memory: str,
    ) -> None:
        def build(level: int, channels: int, depth: int) -> list[Invertible]:
            stem = _norm_act(channels, norm, eps_i) if level == 0 else []
            return stem + _units(channels, depth - (level == 0), norm, eps_i)

        super().__init__(norm, classes, layers, pools, channels, build, features_only, memory)


class RevNeXt(InvertibleNetwork):
    """The hybrid form: one reversible block of one unit per branch, then a pool and ``blocks`` of ``units`` per level.

    A unit is an invertible convolution, norm and leaky ReLU.  The paper does not say which pools and depths it took;
    the defaults are those of the authors' study of errors, 2,446,048 parameters with 10 classes.

    ``keep_branch_input`` keeps the exact input of a branch while the branch is undone, as section 4.4 and the authors'
    code do: how exactly a block finds its input again then depends on neither the slope nor the number of ``units``.
    Float32 bytes per pixel of the input, with 32 ``channels`` and the C++ kernels: 128 for the map, 128 for its
    gradient, 64 for the map inside a branch, 64 for the gradient there and 16 of scratch memory are 400.  False finds
    the input again from the branch's output, and saves the 64 bytes of the map inside.  (The paper's 352 has no
    gradient inside the branch, and 32 bytes for the convolution there.)
    """

    def __init__(
        self,
        norm: NormFactory,
        classes: int,
        *,
        features_only: bool = False,
        blocks: Sequence[int],
        units: int,
        pools: Sequence[str],
        channels: int,
        eps_i: float,
        keep_branch_input: bool,
        memory: str,
    ) -> None:
        def block(channels: int, depth: int) -> Invertible:
            f, g = (_units(channels // 2, depth, norm, eps_i) for _ in "fg")
            return LayerwiseBlock(f, g, keep_input=keep_branch_input)

        def build(level: int, channels: int, depth: int) -> list[Invertible]:
            if level == 0:
                return [*_norm_act(channels, norm, eps_i), block(channels, 1)]
            return [block(channels, units) for _ in range(depth)]

        if len(blocks) != len(pools):
            raise ConfigError(f"blocks needs a number for each of the {len(pools)} pools, got {list(blocks)}")
        super().__init__(norm, classes, (1, *blocks), pools, channels, build, features_only, memory)


def _units(channels: int, number: int, norm: NormFactory, eps_i: float) -> list[Invertible]:
    """Return so many times an invertible convolution, norm and leaky ReLU."""
    layers: list[Invertible] = []
    for _ in range(number):
        layers += [InvertibleConv(channels), *_norm_act(channels, norm, eps_i)]
    return layers


def _norm_act(channels: int, norm: NormFactory, eps_i: float) -> list[Invertible]:
    """Return an invertible norm and leaky ReLU; ConfigError for a norm that neither can be made of."""
    layer: Any = norm(channels)
    if not isinstance(layer, ABN) or layer.activation != "leaky_relu":
        raise ConfigError(
            "invertible networks need the norms 'standard', 'inplace' or 'sync' with activation leaky_relu, got "
            f"{type(layer).__name__} with {getattr(layer, 'activation', 'no activation')}"
        )
    return [InvertibleNorm(layer, eps_i), InvertibleLeakyReLU(layer.activation_param)]


def _check_levels(depths: Sequence[int], pools: Sequence[str]) -> None:
    """Raise ConfigError for pools that there are not, and another number of levels than they make."""
    if not set(pools) <= set(POOLS):
        raise ConfigError(f"pools must be among {', '.join(POOLS)}, got {list(pools)}")
    if len(depths) != len(pools) + 1 or min(depths) < 0 or depths[0] < 1:
        raise ConfigError(
            f"{len(pools)} pools make {len(pools) + 1} levels, the first of depth 1 or more; got {depths}"
        )
