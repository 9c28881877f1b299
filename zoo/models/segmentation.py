"""The base class of networks for semantic segmentation: a body, a head and a 1x1 classifier."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.fx
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.layers.conv import uninitialized
from zoo.models.base import FeatureInfo, Network
from zoo.ops.upsampling import upsample

torch.fx.wrap("upsample")  # a leaf call in torch.fx graphs: proxies have no size

HEAD_CHANNELS = 256


class SegmentationNetwork(Network):
    """Base class: ``body``, a network without classifier; ``head``; and ``cls``, a 1x1 convolution with bias.

    ``forward`` returns logits at the size of the image, ``forward_logits`` at the size of the map. Without classifier
    both return the map of the head, which has `HEAD_CHANNELS` channels. Features (`Network.forward_stages`) are those
    of the body.

    Args:
    - `num_classes`: number of classes; 0 for no classifier.
    - `body`, `head`: the parts.
    """

    classifier_name = linear_name = "cls"
    poolings = ()
    body: Network
    cls: nn.Conv2d

    def __init__(self, num_classes: int, body: Network, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head
        self._add_classifier(num_classes)

    def _add_classifier(self, num_classes: int) -> None:
        if num_classes > 0:
            self.cls = uninitialized(nn.Conv2d, HEAD_CHANNELS, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes, H, W) of images x (N, 3, H, W), or without classifier the head's map."""
        logits = self.forward_logits(x)
        return upsample(logits, x.shape[2:]) if hasattr(self, "cls") else logits

    def forward_logits(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes, h, w) at the size of the map."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the input of the classifier, (N, num_features, h, w), normalized and activated."""
        return self.head(self.body(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits (N, classes, h, w) for the output of `forward_features`; with ``pre_logits``, x itself."""
        return x if pre_logits or not hasattr(self, "cls") else self.cls(x)

    def forward_stages(self, x: Tensor) -> list[Tensor]:
        """Return the raw outputs of the body's stages, without running the head."""
        return self.body.forward_stages(x)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the last map and the outputs of the body's stages, without running the head; see `Network`."""
        return self.body.forward_intermediates(x, *args, **kwargs)

    def group_matcher(self, coarse: bool = False) -> dict[str, list[tuple[str, tuple[int] | None]]]:
        """Return the patterns for the layers of the body. Head and classifier match no pattern and come last."""
        return {
            stage: [(expression.replace("^", r"^body\.", 1), suffix) for expression, suffix in layers]
            for stage, layers in self.body.group_matcher(coarse).items()
        }

    @property
    def feature_info(self) -> FeatureInfo:
        """Channels, reduction and module of each stage of the body."""
        return self.body.feature_info

    @property
    def num_features(self) -> int:
        """Number of input channels of the classifier."""
        return HEAD_CHANNELS

    def set_input_channels(self, in_chans: int) -> None:
        """Replace the weight of the body's first convolution by an uninitialized one for ``in_chans`` channels."""
        self.body.set_input_channels(in_chans)
        self.in_chans = in_chans

    def set_drop_path_rate(self, drop_path_rate: float) -> None:
        """Set the stochastic depth of the body."""
        self.body.set_drop_path_rate(drop_path_rate)

    def set_drop_rate(self, drop_rate: float) -> NoReturn:
        """Raise ConfigError: there is no dropout before the classifier."""
        raise ConfigError(
            f"drop_rate = {drop_rate}: {type(self).__name__} has no dropout before its classifier; omit the argument"
        )
