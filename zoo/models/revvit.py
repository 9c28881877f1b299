"""Reversible vision transformers (Mangalam et al., CVPR 2022), with the state-dict keys of the authors' files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config.network import Spec
from zoo.config.options import ReversibleOptions, StochasticDepth
from zoo.errors import ConfigError
from zoo.layers.conv import drop_path, uninitialized
from zoo.layers.norm import NormFactory
from zoo.layers.reversible import ReversibleBlock, ReversibleSequential
from zoo.models.base import WITH_PREVIOUS, Network
from zoo.models.family import family
from zoo.ops.context import is_fx_proxy

EPS = 1e-6  # eps of the authors' layer norms
INIT_STD = INIT_BIAS = 0.02
MLP_RATIO = 4


class RevViTOptions(StochasticDepth, ReversibleOptions):
    """Options of a reversible vision transformer."""


@family(
    "revvit",
    {
        "revvit_s": {"structure": (12,), "width": 384, "heads": 6, "patch": 16, "image_size": 224},
        "revvit_b": {"structure": (12,), "width": 768, "heads": 12, "patch": 16, "image_size": 224},
    },
    options=RevViTOptions,
    fixed_layers=True,
)
class RevViT(Network):
    """Vision transformer of two streams: y1 = x1 + F(x2), y2 = x2 + G(y1), with attention F and MLP G.

    Both streams start as the patch embeddings plus positions. At the end they are concatenated, normalized and averaged
    over the patches; there is no class token. The streams are channels_last maps (N, width, H/patch, W/patch), so that
    their tokens are a view. In evaluation, the authors' code returns probabilities; this class returns logits.

    Args:
    - `norm`: not used; the norms are layer norms.
    - `structure`: the number of blocks, as a sequence of one number.
    - `width`: channels of a stream.
    - `heads`: attention heads of a block; divides ``width``.
    - `patch`, `image_size`: sides in pixels. All images have this size, because positions are learned.
    - `grid_bits`: the grid of the chain, see `ReversibleSequential`.
    - `memory`: "auto" saves the concatenated streams for backward, "plain" all activations.
    - All others: see `Network`.

    Source: Mangalam et al., Reversible Vision Transformers, CVPR 2022; reversible_mvit.py of PySlowFast.
    """

    classifier_name, linear_name, norm_name = "head", "head.projection", "norm"
    head: nn.Sequential
    pos_embed: nn.Parameter

    def __init__(
        self,
        norm: NormFactory | None,
        num_classes: int,
        *,
        structure: Sequence[int],
        width: int,
        heads: int,
        patch: int,
        image_size: int,
        grid_bits: int | None,
        features_only: bool = False,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.image_size, self._side = image_size, image_size // patch
        proj = uninitialized(nn.Conv2d, 3, width, patch, stride=patch)
        self.patch_embed = nn.Sequential(OrderedDict(proj=proj))
        self.pos_embed = nn.Parameter(torch.empty(1, self._side**2, width))
        (depth,) = structure
        blocks = (AttentionMlpBlock(width, heads) for _ in range(depth))
        layers = ReversibleSequential(blocks, store=memory == "plain", grid_bits=grid_bits)
        self.rev_backbone = nn.Sequential(OrderedDict(layers=layers))
        self._add_stage("patch_embed", "rev_backbone", channels=2 * width, reduction=patch)
        self.norm = MapNorm(2 * width, eps=EPS)
        self._add_classifier(num_classes)

    def _run_stage(self, stage: tuple[str, ...], x: Tensor) -> Tensor:
        if not is_fx_proxy(x) and x.shape[2:] != (self.image_size, self.image_size):
            raise ConfigError(
                f"images of {x.shape[2]} x {x.shape[3]} pixels: this network has learned positions for "
                f"{self.image_size} x {self.image_size}",
                remedy=f"resize or crop images to {self.image_size} pixels (input.crop_train, input.crop_val)",
            )
        positions = self.pos_embed.transpose(1, 2).unflatten(2, (self._side, self._side))
        x = (self.patch_embed(x) + positions).contiguous(memory_format=torch.channels_last)
        return self.rev_backbone((x, x))

    def initialize(self, spec: Spec | None = None) -> None:
        """Initialize all parameters as the authors do: normal weights and positions of std 0.02, biases of 0.02.

        The biases of the patch embedding have torch's own initialization.
        """
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                layer.reset_parameters()
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(layer.weight, std=INIT_STD)
            if isinstance(layer, (nn.Linear, nn.LayerNorm)):
                nn.init.constant_(layer.bias, INIT_BIAS)

    def set_drop_path_rate(self, drop_path_rate: float) -> None:
        """Set the stochastic depth of both branches of each block, from 0 in the first to this rate in the last.

        Each branch is dropped for its own random images. In the authors' code, both branches of a block drop the same.
        """
        blocks: list[AttentionMlpBlock] = list(self.rev_backbone.layers)  # type: ignore[arg-type]
        for index, block in enumerate(blocks):
            block.F.drop_path = block.G.drop_path = drop_path_rate * index / max(1, len(blocks) - 1)

    def group_matcher(self, coarse: bool = False) -> dict[str, list[tuple[str, tuple[int] | None]]]:
        """Return a pattern for the embedding and each block, or with ``coarse`` one for all blocks; see `Network`."""
        number = "" if coarse else r"layers\.(\d+)\."
        return {
            "patch_embed": [(r"^(?:patch_embed|pos_embed)", None)],
            "rev_backbone": [(rf"^rev_backbone\.{number}", None), (r"^norm\.", WITH_PREVIOUS)],
        }


class AttentionMlpBlock(ReversibleBlock):
    """`ReversibleBlock` with attention as F and MLP as G, the names in the authors' state dict."""

    def __init__(self, width: int, heads: int) -> None:
        nn.Module.__init__(self)
        self.F = MapBranch(width, OrderedDict(attn=Attention(width, heads)))
        self.G = MapBranch(width, OrderedDict(mlp=_mlp(width)))
        self.grid_bits = None

    f = property(lambda self: self.F)
    g = property(lambda self: self.G)


class MapBranch(nn.Sequential):
    """Layer norm and ``layers`` of tokens (N, L, C), applied to a map (N, C, H, W); returns a channels_last map.

    The attribute ``drop_path`` is the probability that training drops the output for an image; 0 by default.
    """

    drop_path = 0.0

    def __init__(self, width: int, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__(OrderedDict(norm=nn.LayerNorm(width, eps=EPS), **layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch's output in a new tensor."""
        y = super().forward(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return drop_path(y, self.drop_path) if self.drop_path and self.training else y


class Attention(nn.Module):
    """Multi-head self-attention of tokens (N, L, C), with separate projections q, k and v.

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (uninitialized(nn.Linear, width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return projections of the values' means, weighted by the softmax of q k^T / sqrt(C / heads)."""
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _mlp(width: int) -> nn.Sequential:
    hidden = MLP_RATIO * width
    fc1, fc2 = uninitialized(nn.Linear, width, hidden), uninitialized(nn.Linear, hidden, width)
    return nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))


class MapNorm(nn.LayerNorm):
    """Layer norm over the channels of maps (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized map in channels_last format."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
