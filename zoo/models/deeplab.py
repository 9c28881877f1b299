"""DeepLabV3 for semantic segmentation: a dilated body, the head of `zoo.layers.DeeplabV3`, and a 1x1 classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from zoo.config.architectures import Architecture, architecture
from zoo.config.limits import MAX_SIDE
from zoo.config.options import Dilation, StemOptions
from zoo.config.schema import ShouldBe
from zoo.config.section import Section
from zoo.errors import ConfigError
from zoo.layers.deeplab_head import DeeplabV3
from zoo.layers.norm import NormFactory
from zoo.models.base import Network
from zoo.models.family import build_architecture, head
from zoo.models.segmentation import HEAD_CHANNELS, SegmentationNetwork

# Output stride of the body -> dilations of the head. Distances in the image are the same for both.
HEAD_DILATIONS = {8: (12, 24, 36), 16: (6, 12, 18)}
PoolingSide = Annotated[int, Field(gt=0, le=MAX_SIDE)]


class DeepLabOptions(Section):
    """Options of DeepLabV3."""

    output_stride: Literal[8, 16] = 8
    """Ratio of the image's resolution to that of the feature map that the head reads; sets the dilation of the body."""
    head_dilations: Annotated[list[Dilation], Field(min_length=3, max_length=3)] | None = None
    """Dilations of the head's three 3x3 convolutions; null: 12, 24, 36 for output_stride 8, half of these for 16."""
    pooling_size: (
        Annotated[
            PoolingSide | Annotated[list[PoolingSide], Field(min_length=2, max_length=2)],
            ShouldBe(f"a whole number from 1 to {MAX_SIDE}, or a list of two (rows, columns)"),
        ]
        | None
    ) = None
    """Window of the average pooling in the head's pooled branch in evaluation, in cells of the feature map: a number,
    or rows and columns; null: the whole map. In training, the branch averages over the whole crop."""


class DeepLabStemOptions(StemOptions, DeepLabOptions):
    """Options of DeepLabV3 on a body with two stems."""


def on_body(body: Architecture) -> Architecture | None:
    """Return DeepLabV3 on ``body``, with its memory strategies and stem; None if the body cannot be dilated."""
    if 8 not in body.dilations:
        return None
    return Architecture(
        f"deeplab_{body.name}",
        "deeplab",
        __name__,
        {"body": body.name},
        DeepLabStemOptions if "input_3x3" in body.options.model_fields else DeepLabOptions,
        body.memory,
        dilations={},  # dilated by the option output_stride
        task="segmentation",
        ignores_input_3x3=body.ignores_input_3x3,
    )


@head("deeplab", on_body)
class DeepLab(SegmentationNetwork):
    """DeepLabV3: its head reads the last map of a body, at 1/8 or 1/16 of the image size.

    Args:
    - `norm`: function channels -> norm with its activation, for the head.
    - `num_classes`: number of classes; 0 for no classifier.
    - `body`: a network without classifier.
    - `head_dilations`, `pooling_size`: see `DeeplabV3`.

    Source: Rota Bulo et al., In-Place Activated BatchNorm, CVPR 2018, section 4.2, and its code.
    """

    def __init__(
        self,
        norm: NormFactory,
        num_classes: int,
        *,
        body: Network,
        head_dilations: Sequence[int],
        pooling_size: int | Sequence[int] | None,
    ) -> None:
        body.global_pool = nn.Identity()  # the head reads the map
        head = DeeplabV3(
            body.num_features, HEAD_CHANNELS, dilations=head_dilations, norm_act=norm, pooling_size=pooling_size
        )
        super().__init__(num_classes, body, head)

    @classmethod
    def build(  # type: ignore[override]
        cls,
        norm: NormFactory,
        num_classes: int,
        *,
        body: str,
        features_only: bool,
        output_stride: int,
        head_dilations: Sequence[int] | None,
        pooling_size: int | Sequence[int] | None,
        **of_body: Any,
    ) -> DeepLab:
        """Build DeepLabV3 on the architecture ``body`` with the options ``of_body``, dilated for ``output_stride``.

        Raises ConfigError for ``features_only``.
        """
        if features_only:
            raise ConfigError(
                "features_only: DeepLab computes logits from a single map; use the features of its body: "
                f"zoo.get({body!r}, features_only=True, output_stride={output_stride})"
            )
        arch = architecture(body)
        options = arch.options(dilation=arch.dilations[output_stride]).model_dump(exclude={"drop_path_rate"})
        return cls(
            norm,
            num_classes,
            body=build_architecture(body, norm, 0, features_only=False, **{**options, **of_body}),
            head_dilations=head_dilations or HEAD_DILATIONS[output_stride],
            pooling_size=pooling_size,
        )
