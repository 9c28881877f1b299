"""RevBiFPN (Chiley et al., 2022): a reversible network of up to four resolutions, with the authors' state-dict keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from zoo.config.network import Spec
from zoo.config.options import ReversibleOptions, StochasticDepth
from zoo.errors import ConfigError
from zoo.layers.checkpointing import checkpoint
from zoo.layers.conv import GlobalAvgPool2d, conv2d, drop_path, uninitialized
from zoo.layers.norm import ABN, NormFactory
from zoo.layers.reversible import LinkedModule, ReversibleSequential, StreamAddition, halves_in_layout
from zoo.models.base import WITH_PREVIOUS, Network, check_sides
from zoo.models.family import family
from zoo.ops.chain import Gradients, Link, Tensors
from zoo.ops.context import is_fx_proxy
from zoo.ops.pooling import memory_format_of

EPS = 1e-3  # eps of the batch norms
PATCH = 4  # side of the windows that become channels
REDUCTION = 32  # stride of the coarsest stream
# Settings of the blocks of each stream, finest stream first.
KERNELS = (3, 5, 5, 5)
EXPANSIONS = (1, 1, 2, 2)
SQUEEZES = (0.25, 0.25, 0.125, 0.0)
# Settings of the blocks in neck and head.
HEAD_KERNEL = 5
HEAD_EXPANSIONS = (1, 2, 2, 2)
HEAD_SQUEEZES = (0.25, 0.25, 0.125, 0.125)
BLOCK_LAYERS = 2  # block layers before each silo
# Channels of the streams and of the neck's outputs, channels of the last map, and stages after the first three.
SIZES = [
    ((48, 64, 80, 160), (48, 64, 128, 320), 1280, 2),
    ((64, 80, 96, 208), (64, 80, 160, 416), 1696, 2),
    ((96, 128, 160, 320), (96, 128, 256, 640), 2560, 2),
    ((128, 160, 208, 416), (128, 160, 336, 848), 3408, 3),
    ((192, 256, 320, 640), (192, 256, 512, 1280), 5120, 4),
    ((256, 336, 416, 848), (256, 336, 672, 1696), 6816, 4),
    ((320, 416, 528, 1056), (320, 416, 848, 2128), 8528, 5),
]


class RevBiFPNOptions(StochasticDepth, ReversibleOptions):
    """Options of a RevBiFPN."""

    norm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a batch in the running statistics of norms. 0.19 reproduces the authors' training, which updates them
    twice per batch with 0.1."""


@family(
    "revbifpn",
    {
        f"revbifpn_s{size}": {
            "channels": channels,
            "head_channels": head_channels,
            "features": features,
            "extra_stages": extra_stages,
        }
        for size, (channels, head_channels, features, extra_stages) in enumerate(SIZES)
    },
    options=RevBiFPNOptions,
    fixed_layers=True,
)
class RevBiFPN(Network):
    """Streams at 1/4, 1/8, 1/16 and 1/32 of the image, with additions within streams and between them.

    The first stream is the image with windows of 4 x 4 pixels moved into channels. Each stage has two layers of
    reversible blocks per stream, and a silo that adds functions of each stream to the others. The first three silos
    append a stream. The neck, one block per stream, computes the stages' outputs; the head fuses them.

    Sides of images must be multiples of 32. The authors' training updated running statistics twice per batch, in
    forward and in the recomputation; here they are updated once. ``norm_momentum`` 0.19 = 1 - 0.9^2 has the effect of
    two updates.

    Args:
    - `norm`: not used; the norms are batch norms.
    - `channels`, `head_channels`: channels of the streams, and of the neck's outputs.
    - `features`: channels of the last map, the input of the classifier.
    - `extra_stages`: number of stages after the three that append a stream.
    - `grid_bits`: the grid of the chain, see `ReversibleSequential`.
    - `norm_momentum`: weight of a batch in running statistics.
    - `memory`: "auto" saves the four streams for backward, and recomputes the neck; "plain" saves all activations.
    - All others: see `Network`.

    Source: Chiley et al., RevBiFPN: The Fully Reversible Bidirectional Feature Pyramid Network, arXiv:2206.14098.
    """

    classifier_name = linear_name = "head.fc"
    head: PyramidHead

    def __init__(
        self,
        norm: NormFactory | None,
        num_classes: int,
        *,
        channels: Sequence[int],
        head_channels: Sequence[int],
        features: int,
        extra_stages: int,
        grid_bits: int | None,
        norm_momentum: float,
        features_only: bool = False,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.in_repeated = channels[0] // PATCH**2
        self.recomputes_neck = memory != "plain"
        layers: list[nn.Module] = []
        streams = len(channels)
        for count in [*range(1, streams), *[streams] * extra_stages]:
            layers += [BlockLayer(channels[:count]) for _ in range(BLOCK_LAYERS)]
            appends = len(layers) < (BLOCK_LAYERS + 1) * (streams - 1)
            layers.append(Silo(channels[: count + appends], appends))
        self.rev_stack = RevStack(layers, store=memory == "plain", grid_bits=grid_bits)
        settings = zip(channels, head_channels, HEAD_EXPANSIONS, HEAD_SQUEEZES, strict=True)
        neck = {f"recomp_transform_{i}": MBConv(c, h, HEAD_KERNEL, 1, e, s) for i, (c, h, e, s) in enumerate(settings)}
        self.rev_stack.add_module("recomp_op", nn.ModuleDict(neck))
        for index, width in enumerate(head_channels):
            name = f"rev_stack.recomp_op.recomp_transform_{index}"
            self._add_stage(name, channels=width, reduction=PATCH * 2**index)
        self._last_channels = features
        if not features_only:
            self.head = PyramidHead(head_channels, features)
        self._add_classifier(num_classes)
        for layer in self.modules():
            if isinstance(layer, ABN):
                layer.momentum = norm_momentum

    def _add_classifier(self, num_classes: int) -> None:
        if not self.features_only:
            self.global_pool = GlobalAvgPool2d()
            self.head.fc = uninitialized(nn.Linear, self.num_features, num_classes) if num_classes > 0 else None

    @property
    def num_features(self) -> int:
        """Number of input channels of the classifier; of the last stage with ``features_only``."""
        return super().num_features if self.features_only else self._last_channels

    def set_drop_rate(self, drop_rate: float) -> None:
        """Add dropout with this rate before the classifier's linear layer."""
        if self.num_classes == 0:
            raise ConfigError("drop_rate: RevBiFPN has no classifier; omit the argument")
        self.drop_rate = drop_rate

    def set_drop_path_rate(self, drop_path_rate: float) -> None:
        """Set the stochastic depth of blocks and silos: it rises linearly to this rate in the last stage.

        Functions that add up to a new stream are never dropped.
        """
        layers: list[Any] = list(self.rev_stack)
        stages = len(layers) // (BLOCK_LAYERS + 1)
        for index, layer in enumerate(layers):
            rate = drop_path_rate * (index // (BLOCK_LAYERS + 1) + 1) / stages
            for branch in layer.droppable():
                branch.drop_path = rate

    def _run_streams(self, x: Tensor, selected: Sequence[int]) -> list[Tensor]:
        """Return the outputs of the neck for the selected streams."""
        check_sides(x, REDUCTION)
        repeats, rest = divmod(self.in_repeated, x.shape[1] if not is_fx_proxy(x) else 3)
        images = torch.cat([x] * repeats + [x[:, :rest]] * (rest > 0), 1)
        windows = F.pixel_unshuffle(images, PATCH).unflatten(1, (self.in_repeated, PATCH**2))
        stream = windows.transpose(1, 2).flatten(1, 2)
        if not is_fx_proxy(x):
            stream = stream.contiguous(memory_format=memory_format_of(x))
        recomputes = self.recomputes_neck and not self.rev_stack.store and not is_fx_proxy(x)
        streams, blocks = self.rev_stack(stream), list(self.rev_stack.recomp_op.values())
        pairs = [(blocks[index], streams[index]) for index in selected]
        return [checkpoint(block, each) if recomputes else block(each) for block, each in pairs]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map (N, num_features, H / 32, W / 32), normalized and activated."""
        maps = self._run_streams(x, range(len(self._stages)))
        return maps[-1] if self.features_only else self.head(maps)

    def _run_stages(self, x: Tensor, selected: Sequence[int], last: int) -> tuple[Tensor, list[Tensor]]:
        is_complete = last == len(self._stages) - 1 and not self.features_only
        wanted = range(last + 1) if is_complete else sorted({*selected, last})
        maps = dict(zip(wanted, self._run_streams(x, wanted), strict=True))
        return self.head(list(maps.values())) if is_complete else maps[last], [maps[index] for index in selected]

    def _unused_for(self, selected: Sequence[int]) -> Iterable[nn.Module | nn.Parameter]:
        silo, blocks = list(self.rev_stack)[-1], self.rev_stack.recomp_op.values()
        necks = [block for index, block in enumerate(blocks) if index not in selected]
        return [*necks, *silo.unused_for(selected)]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits for the output of `forward_features`; with ``pre_logits``, the input of ``head.fc``."""
        x = self.global_pool(x)
        if self.head.fc is None:
            return x
        x = F.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.head.fc(x)

    def initialize(self, spec: Spec | None = None) -> None:
        """Initialize all parameters as the authors do: Kaiming-normal convolutions (fan-out), and biases of 0.

        The linear layer has torch's own initialization.
        """
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def group_matcher(self, coarse: bool = False) -> dict[str, list[tuple[str, tuple[int] | None]]]:
        """Return a pattern for each layer, or with ``coarse`` one for all; the head matches none and comes last."""
        number = "" if coarse else r"(\d+)\."
        return {"rev_stack": [(rf"^rev_stack\.{number}", None), (r"^rev_stack\.recomp_op\.", WITH_PREVIOUS)]}


class MBConv(nn.Sequential):
    """Inverted bottleneck without shortcut: expansion, depthwise convolution, squeeze-excite and projection.

    The attribute ``drop_path`` is the probability that training drops the output for an image; 0 by default.

    Args:
    - `expansion`: ratio of inner to input channels; with 1 there is no first convolution.
    - `squeeze`: ratio of squeezed to input channels; with 0 there is no squeeze-excite.
    """

    drop_path = 0.0

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int, squeeze: float
    ) -> None:
        inner = expansion * in_channels
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if expansion != 1:
            layers["exp_conv"] = _conv_norm(in_channels, inner)
        layers["dw_conv"] = _conv_norm(inner, inner, kernel, stride, groups=inner)
        if squeeze > 0:
            layers["se"] = SqueezeExcite(inner, max(1, int(in_channels * squeeze)))
        layers["project_conv"] = _conv_norm(inner, out_channels, activated=False)
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in a new tensor."""
        y = super().forward(x)
        return drop_path(y, self.drop_path) if self.drop_path and self.training else y


class SqueezeExcite(nn.Module):
    """Scales channels by a function of their means (Hu et al., 2018). torchvision's layer has other state-dict keys."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            uninitialized(nn.Conv2d, channels, squeezed, 1),
            nn.Hardswish(),
            uninitialized(nn.Conv2d, squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x scaled per image and channel."""
        return x * self.se(x)


class PyramidHead(nn.Module):
    """Fuses the neck's outputs from the finest to the coarsest; ``fc`` is the classifier's linear layer, or None."""

    fc: nn.Linear | None

    def __init__(self, channels: Sequence[int], features: int) -> None:
        super().__init__()
        settings = zip(pairwise(channels), HEAD_EXPANSIONS, HEAD_SQUEEZES, strict=False)
        self.pyramid_heads = nn.ModuleList(MBConv(c, h, HEAD_KERNEL, 2, e, s) for (c, h), e, s in settings)
        self.final_conv = _conv_norm(channels[-1], features)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the last feature map, at the resolution of the coarsest of the maps."""
        fused = maps[0]
        for block, coarser in zip(self.pyramid_heads, maps[1:], strict=True):
            fused = coarser + block(fused)
        return self.final_conv(fused)


class RevStack(ReversibleSequential):
    """The chain of all layers, named from 1 on. The neck ``recomp_op`` is not part of the chain."""

    recomp_op: nn.ModuleDict

    def __init__(self, layers: Iterable[nn.Module], *, store: bool, grid_bits: int | None) -> None:
        named: Any = OrderedDict((str(index), layer) for index, layer in enumerate(layers, start=1))
        super().__init__(named, store=store, grid_bits=grid_bits)

    def __iter__(self) -> Any:
        """Iterate over the layers of the chain."""
        return (layer for name, layer in self._modules.items() if name != "recomp_op")

    def forward(self, x: Any) -> Any:
        """Compute all streams from the first stream."""
        return self._run(tuple(self), x)


class BlockLayer(LinkedModule):
    """One reversible block per stream: b = b + f(a), then a = a + g(b); a and b are the halves of the channels."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        for index, width in enumerate(channels):
            settings = KERNELS[index], 1, EXPANSIONS[index], SQUEEZES[index]
            half = width // 2
            functions = {name: nn.ModuleDict({"xform_0_1": MBConv(half, half, *settings)}) for name in "fg"}
            self.add_module(f"rev_transform_{index}", nn.ModuleDict(functions))

    def as_links(self) -> tuple[Any, ...]:
        """Return two additions per stream, between links that split and join all streams."""
        links: list[Any] = [_SplitAll()]
        for index, block in enumerate(self.children()):
            first, second = 2 * index, 2 * index + 1
            f, g = (getattr(block, name)["xform_0_1"] for name in "fg")
            links += [
                StreamAddition(f, first, second, self.grid_bits),
                StreamAddition(g, second, first, self.grid_bits),
            ]
        return (*links, _JoinAll())

    def droppable(self) -> Iterable[MBConv]:
        """Return the branches that stochastic depth drops."""
        return [branch for branch in self.modules() if isinstance(branch, MBConv)]


class Silo(LinkedModule):
    """Adds functions of all finer streams to each stream, then functions of all coarser streams.

    Each function reads its stream as it was before the additions of that direction. Targets are therefore updated from
    the coarsest to the finest, and then from the finest to the coarsest.

    Args:
    - `channels`: channels of the streams, including a new one.
    - `appends`: whether the last stream is new, that is, the sum of functions of the others.
    """

    def __init__(self, channels: Sequence[int], appends: bool) -> None:
        super().__init__()
        self.channels, self.appends = channels, appends
        self.f, self.g = nn.ModuleDict(), nn.ModuleDict()
        count = len(channels)
        for i in range(count):
            for j in range(i + 1, count):
                stride = 2 ** (j - i)
                self.f[f"xform_{i}_{j}"] = MBConv(
                    channels[i], channels[j], 2 * stride - 1, stride, EXPANSIONS[i], SQUEEZES[i]
                )
        for i in reversed(range(count)):
            for j in reversed(range(i)):
                kernel = 5 if i == len(KERNELS) - 1 else 3
                block = MBConv(channels[i], channels[j], kernel, 1, EXPANSIONS[j], SQUEEZES[j])
                upsample = nn.Upsample(scale_factor=2 ** (i - j), mode="bilinear", align_corners=False)
                self.g[f"xform_{count - 1 - i}_{count - 1 - j}"] = nn.Sequential(block, upsample)

    def as_links(self) -> tuple[Any, ...]:
        """Return one addition per function."""
        last = len(self.channels) - 1
        links: list[Any] = [_Append(self.channels[-1])] if self.appends else []
        for j in range(last, 0, -1):
            links += [StreamAddition(self.f[f"xform_{i}_{j}"], i, j, self.grid_bits) for i in range(j)]
        for j in range(last):
            links += [
                StreamAddition(self.g[f"xform_{last - i}_{last - j}"], i, j, self.grid_bits) for i in range(last, j, -1)
            ]
        return tuple(links)

    def droppable(self) -> Iterable[MBConv]:
        """Return the branches that stochastic depth drops: all except those that compute a new stream."""
        last = f"_{len(self.channels) - 1}" if self.appends else "none"
        branches = [block for name, block in self.f.items() if not name.endswith(last)]
        return [*branches, *(block for block in self.g.modules() if isinstance(block, MBConv))]  # type: ignore[list-item]

    def unused_for(self, selected: Sequence[int]) -> Iterable[nn.Module]:
        """Return the functions that affect no selected stream, neither directly nor through coarser streams."""
        last = len(self.channels) - 1
        for i in range(last + 1):
            for j in range(last + 1):
                if i < j < selected[0]:
                    yield self.f[f"xform_{i}_{j}"]
                elif i > j and j not in selected:
                    yield self.g[f"xform_{last - i}_{last - j}"]


class _SplitAll(Link):
    """Splits the channels of each stream into two halves."""

    is_end = True

    def __call__(self, *xs: Tensor) -> Tensors:
        return tuple(half for x in xs for half in halves_in_layout(x))

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, Tensors, Gradients]:
        return _join_halves(ys), _join_halves(grads), {}


class _JoinAll(Link):
    """Concatenates the halves of each stream."""

    is_end = True

    def __call__(self, *xs: Tensor) -> Tensors:
        return _join_halves(xs)

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, Tensors, Gradients]:
        ys, grads = (tuple(half for x in each for half in halves_in_layout(x)) for each in (ys, grads))
        return ys, grads, {}


class _Append(Link):
    """Appends a stream of zeros with half the height and width of the last one; backward drops it."""

    is_end = True

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __call__(self, *xs: Tensor) -> Tensors:
        x = xs[-1]
        zeros = x.new_zeros(x.shape[0], self.channels, x.shape[2] // 2, x.shape[3] // 2)
        return (*xs, zeros if is_fx_proxy(x) else zeros.to(memory_format=memory_format_of(x)))

    def reverse(self, ys: Tensors, grads: Tensors, may_overwrite: bool) -> tuple[Tensors, Tensors, Gradients]:
        return ys[:-1], grads[:-1], {}


def _join_halves(xs: Tensors) -> Tensors:
    cat = (lambda *pair: torch.cat(pair, 1)) if is_fx_proxy(xs[0]) else _Cat.apply
    return tuple(cat(*pair) for pair in zip(xs[::2], xs[1::2], strict=True))


class _Cat(torch.autograd.Function):
    """Concatenates two halves. Its gradients are not views, because batch norms would sum views in another order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x1: Tensor, x2: Tensor) -> Tensor:
        return torch.cat((x1, x2), 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return halves_in_layout(dy)


def _conv_norm(
    in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, groups: int = 1, activated: bool = True
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=conv2d(in_channels, out_channels, kernel, stride, groups),
        norm=ABN(out_channels, eps=EPS, activation="identity"),
    )
    if activated:
        layers["act"] = nn.Hardswish()
    return nn.Sequential(layers)
