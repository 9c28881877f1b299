"""Semantic segmentation from maps of several resolutions: a body, the head of HRNetV2, and a 1x1 classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.config.architectures import Architecture
from zoo.config.network import Spec
from zoo.errors import ConfigError
from zoo.layers.conv import conv2d
from zoo.layers.init import init_weights
from zoo.layers.norm import ABN, NormFactory
from zoo.models.base import Network
from zoo.models.family import build_architecture, head
from zoo.models.segmentation import HEAD_CHANNELS, SegmentationNetwork


def on_body(body: Architecture) -> Architecture | None:
    """Return the network with this head on ``body``; None unless it is a RevBiFPN, whose features are a pyramid."""
    if body.family != "revbifpn":
        return None
    return replace(
        body,
        name=f"pyramid_{body.name}",
        family="pyramid",
        module=__name__,
        structure={"body": body.name},
        task="segmentation",
    )


@head("pyramid", on_body)
class Pyramid(SegmentationNetwork):
    """Segmentation network; its head fuses all maps of the body into one map of the finest resolution.

    Images are padded with zeros at the bottom and right to multiples of the coarsest stride. The fused map is cropped
    to the image: its sides are the sides of the image divided by the finest stride, rounded up.

    Args:
    - `num_classes`: number of classes; 0 for no classifier.
    - `body`: a network with ``features_only``.

    Source: Sun et al., High-Resolution Representations for Labeling Pixels and Regions, arXiv:1904.04514, figure 3,
    with 256 channels in the head.
    """

    head: MapFusion

    def __init__(self, num_classes: int, *, body: Network) -> None:
        super().__init__(num_classes, body, MapFusion(body.feature_info.channels(), HEAD_CHANNELS))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, (N, num_features, h, w), normalized and activated."""
        finest, *_, coarsest = self.feature_info.reduction()
        fused = self.head(self.body(F.pad(x, (0, -x.shape[3] % coarsest, 0, -x.shape[2] % coarsest))))
        return fused[:, :, : -(-x.shape[2] // finest), : -(-x.shape[3] // finest)]

    @classmethod
    def build(  # type: ignore[override]
        cls, norm: NormFactory | None, num_classes: int, *, body: str, features_only: bool, **of_body: Any
    ) -> Pyramid:
        """Build the network on the architecture ``body`` with the options ``of_body``.

        Raises ConfigError for ``features_only``.
        """
        if features_only:
            raise ConfigError(
                f"features_only: the head fuses the features of the body: use zoo.get({body!r}, features_only=True)"
            )
        return cls(num_classes, body=build_architecture(body, norm, 0, features_only=True, **of_body))

    def initialize(self, spec: Spec) -> None:
        """Initialize the body as its authors do, and the other convolutions for the ReLUs after them."""
        self.body.initialize(spec)
        init_weights(self.head, activation="relu")
        if hasattr(self, "cls"):
            init_weights(self.cls, activation="relu")


class MapFusion(nn.Module):
    """Upsamples maps to the finest resolution, concatenates them, and applies a 1x1 convolution, batch norm and ReLU.

    A 1x1 convolution of concatenated maps is the sum of one convolution per map, and commutes with upsampling, so each
    map is convolved at its own resolution.

    Args:
    - `channels`: channels of the maps, finest first.
    - `out_channels`: channels of the output.
    """

    def __init__(self, channels: Sequence[int], out_channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv2d(width, out_channels, 1) for width in channels)
        self.norm = ABN(out_channels, activation="relu")

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Return the normalized and activated map in a new tensor."""
        fused, *others = (conv(x) for conv, x in zip(self.convs, maps, strict=True))
        for other in others:
            fused = fused + F.interpolate(other, size=maps[0].shape[2:], mode="bilinear", align_corners=False)
        return self.norm(fused)
