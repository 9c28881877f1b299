"""RevCol (Cai et al., ICLR 2023): columns of four levels that update four maps, with the authors' state-dict keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config.network import Spec
from zoo.config.options import StochasticDepth
from zoo.errors import ConfigError
from zoo.layers.checkpointing import checkpoint
from zoo.layers.conv import GlobalAvgPool2d, drop_path, uninitialized
from zoo.layers.norm import NormFactory
from zoo.layers.reversible import LinkedModule, replace_stream, subtract_branch
from zoo.models.base import Network, check_sides
from zoo.models.family import CHECKPOINTED, family
from zoo.models.revvit import MapNorm
from zoo.ops.chain import ErrorCallback, Gradients, Tensors, run_chain
from zoo.ops.context import is_fx_proxy

EPS = 1e-6  # eps of the layer norms
INIT_STD = 0.02
SMALLEST_FACTOR = 1e-3  # smallest absolute value of a factor, because backward divides by factors
REDUCTION = 32  # stride of the coarsest map
# Classifiers and decoders of intermediate supervision in the authors' files.
SUPERVISED, LAST_SUPERVISED = ("cls_blocks.", "decoder_blocks."), "cls_blocks.3."
CHAIN_COLUMNS = 4  # columns per chain: rounding errors about double with each column


@family(
    "revcol",
    {
        "revcol_tiny": {"structure": (2, 2, 4, 2), "channels": (64, 128, 256, 512), "columns": 4},
        "revcol_small": {"structure": (2, 2, 4, 2), "channels": (64, 128, 256, 512), "columns": 8},
        "revcol_base": {"structure": (1, 1, 3, 2), "channels": (72, 144, 288, 576), "columns": 16},
        "revcol_large": {"structure": (1, 2, 6, 2), "channels": (128, 256, 512, 1024), "columns": 8},
    },
    options=StochasticDepth,
    memory=CHECKPOINTED,
    made_lean="plain",  # reconstruction would not be exact
    fixed_layers=True,
)
class RevCol(Network):
    """Columns with levels at 1/4, 1/8, 1/16 and 1/32 of the image; each level updates a map of the previous column.

    In a column, c_i = alpha_i c_i + level_i(c_(i-1), c_(i+1)), with the new finer map, the old coarser map, and a
    learned factor alpha_i per channel. c_(-1) is the stem's output. All maps are 0 before the first
    column. Sides of images must be multiples of 32.

    Backward reconstructs old maps as (c_i - level_i) / alpha_i. This division is inexact, so gradients have rounding
    errors, and factors below 1 amplify them in each column. The maps after every fourth column are therefore saved.
    "checkpoint" and "lean" compute the gradients of stored activations.

    In each forward pass, the authors overwrite parameters whose absolute value is below 1e-3 with 1e-3. Here,
    parameters are not modified: forward uses the factor 1e-3 with the sign of the parameter, and the parameter gets the
    gradient of the factor.

    Args:
    - `norm`: not used; the norms are layer norms.
    - `structure`: number of blocks of each level.
    - `channels`: channels of each level.
    - `columns`: number of columns.
    - `memory`: "auto" saves the output of the stem and the maps of every fourth column for backward, "checkpoint" the
      maps of each column, "plain" all activations.
    - All others: see `Network`.

    Source: Cai et al., Reversible Column Networks, ICLR 2023.
    """

    classifier_name, linear_name = "cls", "cls.classifier.1"
    cls: MapClassifier

    def __init__(
        self,
        norm: NormFactory | None,
        num_classes: int,
        *,
        structure: Sequence[int],
        channels: Sequence[int],
        columns: int,
        features_only: bool = False,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.memory, self.channels = memory, channels
        self.store = memory != "auto"
        self.meter: ErrorCallback | None = None
        self.stem = nn.Sequential(uninitialized(nn.Conv2d, 3, channels[0], 4, stride=4), MapNorm(channels[0], eps=EPS))
        self._columns = [f"subnet{index}" for index in range(columns)]
        for index, name in enumerate(self._columns):
            self.add_module(name, Column(channels, structure, is_first=index == 0))
        for index, width in enumerate(channels):
            self._add_stage(f"{self._columns[-1]}.level{index}", channels=width, reduction=4 * 2**index)
        self._add_classifier(num_classes)

    def _add_classifier(self, num_classes: int) -> None:
        if self.features_only:
            return
        if num_classes > 0:
            self.cls = MapClassifier(self.num_features, num_classes, self.drop_rate)
        else:
            self.global_pool = GlobalAvgPool2d()

    @classmethod
    def rename_keys(cls, state_dict: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Rename the last classifier of a state dict with intermediate supervision to ``cls``, and drop the others."""
        if not any(key.startswith(LAST_SUPERVISED) for key in state_dict):
            return state_dict
        renamed = {key.replace(LAST_SUPERVISED, "cls."): tensor for key, tensor in state_dict.items()}
        return {key: tensor for key, tensor in renamed.items() if not key.startswith(SUPERVISED)}

    def set_drop_rate(self, drop_rate: float) -> None:
        """Add dropout with this rate before the classifier's linear layer."""
        if not hasattr(self, "cls"):
            raise ConfigError("drop_rate: RevCol has no classifier; omit the argument")
        self.drop_rate = self.cls.drop.p = drop_rate

    def set_drop_path_rate(self, drop_path_rate: float) -> None:
        """Set the stochastic depth of the blocks: in each column from 0 in the first to this rate in the last."""
        for name in self._columns:
            blocks = [block for block in self.get_submodule(name).modules() if isinstance(block, Block)]
            for index, block in enumerate(blocks):
                block.drop_path = drop_path_rate * index / max(1, len(blocks) - 1)

    def _run_columns(self, x: Tensor) -> Tensors:
        """Return the four maps of the last column."""
        check_sides(x, REDUCTION)
        x = self.stem(x)
        maps = []
        for index, width in enumerate(self.channels):
            zeros = x.new_zeros(x.shape[0], width, x.shape[2] // 2**index, x.shape[3] // 2**index)
            maps.append(zeros if is_fx_proxy(x) else zeros.to(memory_format=torch.channels_last))
        columns, streams = [self.get_submodule(name) for name in self._columns], (x, *maps)
        if self.memory == "checkpoint" and not is_fx_proxy(x):
            streams = run_chain([], *streams, store=True)  # casts to the precision of the other strategies
            for column in columns:
                streams = checkpoint(column, *streams)
            return streams[1:]
        for first in range(0, len(columns), CHAIN_COLUMNS):
            meter = None if self.meter is None else partial(_report, self.meter, first)
            streams = run_chain(columns[first : first + CHAIN_COLUMNS], *streams, store=self.store, meter=meter)
        return streams[1:]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the coarsest map of the last column, (N, num_features, H / 32, W / 32)."""
        return self._run_columns(x)[-1]

    def _run_stages(self, x: Tensor, selected: Sequence[int], last: int) -> tuple[Tensor, list[Tensor]]:
        maps = self._run_columns(x)
        return maps[last], [maps[index] for index in selected]

    def _unused_for(self, selected: Sequence[int]) -> Iterable[nn.Module | nn.Parameter]:
        used = selected[-1]  # the coarsest map of a column that a selected map depends on
        for name in reversed(self._columns):
            column = self.get_submodule(name)
            for index in range(used + 1, len(self.channels)):
                yield column.get_submodule(f"level{index}")
                yield column.get_parameter(f"alpha{index}")
            used += 1

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits for the output of `forward_features`; with ``pre_logits``, the linear layer's input."""
        return self.cls(x, pre_logits) if hasattr(self, "cls") else self.global_pool(x)

    def initialize(self, spec: Spec | None = None) -> None:
        """Initialize all parameters as the authors do: normal weights of std 0.02, truncated, and biases of 0."""
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(layer.weight, std=INIT_STD)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def group_matcher(self, coarse: bool = False) -> dict[str, list[tuple[str, tuple[int] | None]]]:
        """Return a pattern for the stem and for each column, or with ``coarse`` one for all columns; see `Network`."""
        return {"stem": [(r"^stem\.", None)], "columns": [(r"^subnet" if coarse else r"^subnet(\d+)\.", None)]}


class MapClassifier(nn.Module):
    """Mean over the map, layer norm, dropout and a linear layer."""

    def __init__(self, channels: int, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        self.avg_pool = GlobalAvgPool2d()
        self.drop = nn.Dropout(drop_rate)
        self.classifier = nn.Sequential(
            nn.LayerNorm(channels, eps=EPS), uninitialized(nn.Linear, channels, num_classes)
        )

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits (N, classes), or with ``pre_logits`` the linear layer's input."""
        norm, linear = self.classifier
        x = self.drop(norm(self.avg_pool(x)))
        return x if pre_logits else linear(x)


class Column(LinkedModule):
    """One column: the part of a chain that updates four maps one after the other, from the stem's output."""

    def __init__(self, channels: Sequence[int], structure: Sequence[int], is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        for index, width in enumerate(channels):
            self.register_parameter(f"alpha{index}", nn.Parameter(torch.full((1, width, 1, 1), 0.5)))
        for index, depth in enumerate(structure):
            self.add_module(f"level{index}", Level(channels, index, depth, is_first))

    def as_links(self) -> tuple[LevelUpdate, ...]:
        """Return one link per level."""
        return tuple(LevelUpdate(self, index) for index in range(4))


class LevelUpdate:
    """Link that replaces a map c by factor c + level(finer, coarser); the first stream is the stem's output."""

    def __init__(self, column: Column, index: int) -> None:
        self.column, self.target = column, index + 1
        self.level: Any = getattr(column, f"level{index}")
        self.sources = (index, index + 2) if hasattr(self.level.fusion, "up") else (index,)
        self.alpha: Tensor = getattr(column, f"alpha{index}")

    def __call__(self, *xs: Tensor) -> Tensors:
        """Return all streams; only the map of the level is a new tensor."""
        added = self.level(*(xs[source] for source in self.sources))
        return replace_stream(xs, self.target, _factor(self.alpha) * xs[self.target] + added)

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules with the parameters of this level. The factors are in the column."""
        return (self.column, *self.level.modules())

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, Tensors, Gradients]:
        """Return the streams before the update, their gradients, and the gradients of the parameters."""
        dy, factor = grads[self.target], _factor(self.alpha)
        sources, dsources = (tuple(each[source] for source in self.sources) for each in (ys, grads))
        scaled, dsources, gradients, _ = subtract_branch(
            self.level, sources, ys[self.target], dsources, dy, may_overwrite, grid_bits=None
        )
        x = scaled.zero_() if self.column.is_first else scaled.div_(factor)
        gradients[self.alpha] = (dy * x).sum((0, 2, 3), keepdim=True)
        for source, dsource in zip(self.sources, dsources, strict=True):
            grads = replace_stream(grads, source, dsource)
        return replace_stream(ys, self.target, x), replace_stream(grads, self.target, dy * factor), gradients


def _report(meter: ErrorCallback, first: int, index: int, error: float) -> None:
    meter(first + index, error)


def _factor(alpha: Tensor) -> Tensor:
    """Return alpha with absolute values of at least `SMALLEST_FACTOR`; its gradient is the gradient of alpha."""
    values = alpha.detach()
    bounded = values.abs().clamp(min=SMALLEST_FACTOR).copysign(values)
    return alpha + (bounded - values)


class Level(nn.Module):
    """Sum of the downsampled finer map and the upsampled coarser map, followed by blocks."""

    def __init__(self, channels: Sequence[int], index: int, depth: int, is_first: bool) -> None:
        super().__init__()
        self.fusion = Fusion(channels, index, has_up=not is_first and index + 1 < len(channels))
        self.blocks = nn.Sequential(*(Block(channels[index]) for _ in range(depth)))

    def forward(self, finer: Tensor, coarser: Tensor | None = None) -> Tensor:
        """Return the level's output in a new tensor."""
        return self.blocks(self.fusion(finer, coarser))


class Fusion(nn.Module):
    """The sum at the start of a level. The first level does not downsample the finer map."""

    def __init__(self, channels: Sequence[int], index: int, has_up: bool) -> None:
        super().__init__()
        width = channels[index]
        if index > 0:
            conv = uninitialized(nn.Conv2d, channels[index - 1], width, 2, stride=2)
            self.down = nn.Sequential(conv, MapNorm(width, eps=EPS))
        if has_up:
            self.up = Up(channels[index + 1], width)

    def forward(self, finer: Tensor, coarser: Tensor | None) -> Tensor:
        """Return the sum."""
        x = self.down(finer) if hasattr(self, "down") else finer
        return x if coarser is None else x + self.up(coarser)


class Up(nn.Module):
    """Linear layer and layer norm over the channels, and nearest-neighbor upsampling by 2."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        linear = uninitialized(nn.Linear, in_channels, channels)
        self.channel_reschedule = nn.Sequential(linear, nn.LayerNorm(channels, eps=EPS))
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x: Tensor) -> Tensor:
        """Return the upsampled map."""
        return self.upsample(self.channel_reschedule(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


class Block(nn.Module):
    """ConvNeXt block with a 3x3 depthwise convolution. torchvision's block has a 7x7 convolution and other keys.

    The attribute ``drop_path`` is the probability that training drops the branch for an image; 0 by default.

    Source: Liu et al., A ConvNet for the 2020s, 2022.
    """

    drop_path = 0.0

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6))
        self.dwconv = uninitialized(nn.Conv2d, channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=EPS)
        self.pwconv1 = uninitialized(nn.Linear, channels, 4 * channels)
        self.act = nn.GELU()
        self.pwconv2 = uninitialized(nn.Linear, 4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in a new tensor."""
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = (self.gamma * self.pwconv2(self.act(self.pwconv1(y)))).permute(0, 3, 1, 2)
        return x + (drop_path(y, self.drop_path) if self.drop_path and self.training else y)
