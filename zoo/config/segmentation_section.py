"""The ``segmentation`` section: labels for each pixel, how they are cropped for training, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zoo.limits import MAX_SIDE
from zoo.section import Section

Factor = Annotated[float, Field(ge=0.01, le=100)]


class Segmentation(Section):
    """Labels for each pixel; null for networks that classify whole images."""

    layout: Literal["folders", "cityscapes", "coco_stuff", "vistas"] = "folders"
    """How images and label maps are laid out on disk: folders: train and val with images and labels in each; the others
    are read as they are published."""
    ignore_label: Annotated[int, Field(ge=0, le=65535)] = 255
    """Label of the pixels that count neither in training nor in scores."""
    scale_range: Annotated[list[Factor], Field(min_length=2, max_length=2)] = Field(default=[0.7, 2.0])
    """Smallest and largest factor by which a training image is scaled at random, before the crop of side
    input.crop_train."""
    hard_pixels: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the pixels of a training crop, those with the largest loss, over which the loss is averaged; 1: all."""
    class_uniform: bool = False
    """Whether training crops are drawn so that all classes come up equally often: a class, an image that has it, and a
    crop that holds a pixel of it."""
    longest_side_val: Annotated[int, Field(gt=0, le=MAX_SIDE)] | None = None
    """Longer side that images are resized to for validation and inference; null: not resized. Scores are always taken
    at the size of the label map."""

    def conflicts(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield a complaint about a range that runs backwards."""
        if self.scale_range[0] > self.scale_range[1]:
            yield ("scale_range",), "should be the smallest factor, then the largest"
