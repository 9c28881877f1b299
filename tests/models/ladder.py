"""A family of networks outside of the package: rungs of two convolutions, each at half the resolution of the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from zoo.config.section import Section
from zoo.layers.conv import conv2d
from zoo.layers.norm import NormFactory
from zoo.models.base import Network
from zoo.models.family import family


class LadderOptions(Section):
    """Options of a ladder."""

    width: Annotated[int, Field(ge=8, le=64, multiple_of=8)] = 8
    """Channels of the first rung."""
    dilation: Literal[1, 2, 4] = 1
    """Dilation of the last convolutions, which replaces their strides."""


@family(
    "ladder",
    {"ladder_short": {"rungs": (1, 1)}, "ladder_long": {"rungs": (1, 2)}},
    options=LadderOptions,
    dilations={32: 1, 16: 2, 8: 4},
    input="cifar",
)
class Ladder(Network):
    """Stem of stride 4, rungs of stride 2 of which the last may be dilated instead, and a convolution of stride 2."""

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        rungs: Sequence[int],
        width: int,
        dilation: int,
        features_only: bool = False,
        memory: str,
    ) -> None:
        super().__init__(features_only)
        self.stem = nn.Sequential(conv2d(3, width, 5, stride=4), norm(width))
        self._add_stage("stem", channels=width, reduction=4)
        reduction = 4
        for index, depth in enumerate((*rungs, 1)):
            stride = 2 if reduction < 32 // dilation else 1
            layers: list[nn.Module] = [
                conv2d(width, 2 * width, 3, stride=stride, dilation=1 if stride == 2 else dilation)
            ]
            width, reduction = 2 * width, reduction * stride
            for _ in range(depth):
                layers += [norm(width), conv2d(width, width, 3)]
            self.add_module(f"rung{index}", nn.Sequential(*layers, norm(width)))
            self._add_stage(f"rung{index}", channels=width, reduction=reduction)
        self._add_classifier(num_classes)
