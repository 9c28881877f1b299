"""Transforms of an image together with its label map.

Images are resized bilinearly, label maps by nearest neighbor: the mean of two class numbers is another class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import functional as tvF

from zoo.config.experiment import Input
from zoo.config.limits import MAX_PIXELS
from zoo.data.transforms.augmentation import Normalization, draw_colors, finish
from zoo.errors import DataError


class Pixel(NamedTuple):
    """The position of a pixel from the upper left corner."""

    row: int
    column: int


@dataclass(frozen=True)
class SegmentationTrain:
    """The training transform: image and classes -> (3, crop, crop) float32 and (crop, crop) int64.

    The steps: resize by a factor drawn uniformly from ``scale_range`` -> random crop -> flip with probability 1/2 ->
    scale values to 0..1 -> [color jitter] -> [lighting] -> normalize -> pad at the right and bottom, if the resized
    image is smaller than the crop, with 0 (the mean color) and with the ignore label. The paper flips first, which is
    equivalent.

    Args:
    - `settings`: uses ``crop_train``, ``color_jitter_train``, ``lighting_train``, ``mean`` and ``std``.
    - `scale_range`: smallest and largest factor.
    - `ignore_label`: the target of padded pixels.
    """

    settings: Input
    scale_range: Sequence[float]
    ignore_label: int

    def __call__(
        self, image: Image.Image, classes: np.ndarray, pixel: Pixel | None, generator: Random
    ) -> tuple[Tensor, Tensor]:
        """Return crop and target of ``image`` and ``classes`` (H, W); the crop contains ``pixel``, if given.

        Only the pixels of the crop are resized, which saves time for large images.
        """
        low, high = self.scale_range
        factor = generator.uniform(low, high)
        rows = _drawn_axis(image.height, factor, self.settings.crop_train, pixel and pixel.row, generator)
        columns = _drawn_axis(image.width, factor, self.settings.crop_train, pixel and pixel.column, generator)
        box = (columns.start, rows.start, columns.end, rows.end)
        crop = image.resize((columns.length, rows.length), Image.Resampling.BILINEAR, box=box)
        target = torch.from_numpy(classes[np.ix_(rows.nearest(), columns.nearest())].astype(np.int64))
        tensor = tvF.pil_to_tensor(crop)
        if generator.random() < 0.5:
            tensor, target = tensor.flip(-1), target.flip(-1)
        colors = draw_colors(self.settings.color_jitter_train is True, self.settings.lighting_train, generator)
        changes = None if colors is None else torch.tensor([colors])
        tensor = finish(tensor[None], changes, Normalization(self.settings.mean, self.settings.std))[0]
        padding = [0, self.settings.crop_train - columns.length, 0, self.settings.crop_train - rows.length]
        return F.pad(tensor, padding), F.pad(target, padding, value=self.ignore_label)


@dataclass(frozen=True)
class SegmentationVal:
    """The validation transform: image -> normalized (3, h, w). Classes (H, W) become int64 and are not resized.

    Args:
    - `mean`, `std`: mean and standard deviation of red, green and blue, for values from 0 to 1.
    - `longest_side`: the longer side after resizing, px, see `scale_to_longest_side`; None keeps the size.
    """

    mean: Sequence[float]
    std: Sequence[float]
    longest_side: int | None = None

    def __call__(
        self, image: Image.Image, classes: np.ndarray, pixel: Pixel | None, generator: Random
    ) -> tuple[Tensor, Tensor]:
        """Return tensor and target of ``image`` and ``classes``, without cropping or randomness."""
        if self.longest_side is not None:
            image = scale_to_longest_side(image, self.longest_side)
        return tvF.normalize(tvF.to_tensor(image), list(self.mean), list(self.std)), torch.from_numpy(classes).long()


def scale_to_longest_side(image: Image.Image, longest_side: int) -> Image.Image:
    """Return ``image`` resized bilinearly to a longer side of ``longest_side`` px.

    Both sides are truncated products of floats, as in the original project's script that scored the published network.
    At 2048 px, one image size in nine therefore gets a longer side of 2047 px.

    Raises DataError if the result would have no pixels or too many.
    """
    factor = longest_side / max(image.size)
    width, height = (int(side * factor) for side in image.size)
    if min(width, height) < 1 or width * height > MAX_PIXELS:
        what = f"an image of {image.width} x {image.height} px would be resized to {width} x {height} px"
        remedy = f"set a value that gives between 1 and {MAX_PIXELS:,} px"
        raise DataError(what, f"segmentation.longest_side_val = {longest_side}", remedy)
    return image.resize((width, height), Image.Resampling.BILINEAR)


class _Axis(NamedTuple):
    """The extent of a crop along one axis.

    Args:
    - `side`: length of the image, px.
    - `scaled`: length of the resized image, px.
    - `first`: first pixel of the crop in the resized image.
    - `length`: length of the crop, px.
    """

    side: int
    scaled: int
    first: int
    length: int

    @property
    def start(self) -> float:
        """Start of the crop, in pixels of the image."""
        return self.first * self.side / self.scaled

    @property
    def end(self) -> float:
        """End of the crop, in pixels of the image."""
        return (self.first + self.length) * self.side / self.scaled

    def nearest(self) -> np.ndarray:
        """Return, for each pixel of the crop, the pixel of the image that contains its center."""
        centers = 2 * np.arange(self.first, self.first + self.length, dtype=np.int64) + 1
        return centers * self.side // (2 * self.scaled)


def _drawn_axis(side: int, factor: float, crop: int, pixel: int | None, generator: Random) -> _Axis:
    """Draw an extent of ``crop`` pixels that contains the resized ``pixel``, if given."""
    scaled = max(1, round(side * factor))
    low, high = 0, max(0, scaled - crop)
    if pixel is not None:
        position = (2 * pixel + 1) * scaled // (2 * side)
        low, high = max(low, position - crop + 1), min(high, position)
    return _Axis(side, scaled, generator.randint(low, high), min(crop, scaled))
