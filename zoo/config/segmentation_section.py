"""The ``segmentation`` section: label maps, training crops, and the pixels of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zoo.config.limits import MAX_SIDE
from zoo.config.section import Section

Factor = Annotated[float, Field(ge=0.01, le=100)]


class Segmentation(Section):
    """Label maps and crops of a segmentation; null for classification."""

    layout: Literal["folders", "cityscapes", "coco_stuff", "vistas"] = "folders"
    """Layout of images and label maps on disk. folders: train and val with images and labels in each; the others as
    published."""
    ignore_label: Annotated[int, Field(ge=0, le=65535)] = 255
    """Label of pixels that are ignored in training and in scores."""
    scale_range: Annotated[list[Factor], Field(min_length=2, max_length=2)] = Field(default=[0.7, 2.0])
    """Smallest and largest factor by which training images are scaled at random before the crop of input.crop_train
    px."""
    hard_pixels: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the pixels of a training crop, those with the largest losses, that the loss averages; 1: all."""
    class_uniform: bool = False
    """Class-uniform sampling of training crops: draw a class, then an image with that class, then a crop with a pixel
    of it."""
    longest_side_val: Annotated[int, Field(gt=0, le=MAX_SIDE)] | None = None
    """Longer side that images are resized to for validation and inference; null: not resized. Scores are always
    computed at the size of the label map."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield a problem for a reversed range."""
        if self.scale_range[0] > self.scale_range[1]:
            yield "scale_range", "should be the smallest factor, then the largest"
