"""Transforms of an image together with the classes of its pixels.

Images are scaled bilinearly, classes by taking the nearest pixel: a mean of two classes would be a third one.
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

from zoo.config import Input
from zoo.data.augmentation import Normalization, draw_colors, finish
from zoo.errors import DataError
from zoo.limits import MAX_PIXELS


class Pixel(NamedTuple):
    """The place of a pixel, counted from the upper left corner."""

    row: int
    column: int


@dataclass(frozen=True)
class SegmentationTrain:
    """Cuts a training crop out of an image and its classes: (3, crop, crop) float32 and (crop, crop) int64.

    The steps: scaled by a factor drawn uniformly from ``scale_range`` -> a crop at random -> mirrored in half of the
    cases -> values from 0 to 1 -> [color jitter] -> [lighting] -> normalized -> padded at the right and the bottom,
    where the scaled image is smaller than the crop: with 0, the mean color, and with the ignore label. The paper
    mirrors first, which makes no difference.

    Args:
    - `settings`: ``crop_train``, ``color_jitter_train``, ``lighting_train``, ``mean`` and ``std`` are used.
    - `scale_range`: least and greatest factor.
    - `ignore_label`: the target of padded pixels.
    """

    settings: Input
    scale_range: Sequence[float]
    ignore_label: int

    def __call__(
        self, image: Image.Image, classes: np.ndarray, pixel: Pixel | None, generator: Random
    ) -> tuple[Tensor, Tensor]:
        """Return crop and target of ``image`` and ``classes`` (H, W).

        If a ``pixel`` is given, the crop contains the place of this pixel in the scaled image. Only the pixels of the
        crop are scaled, which are few where the image is large.
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
        colors = draw_colors(self.settings.color_jitter_train, self.settings.lighting_train, generator)
        changes = None if colors is None else torch.tensor([colors])
        tensor = finish(tensor[None], changes, Normalization(self.settings.mean, self.settings.std))[0]
        padding = [0, self.settings.crop_train - columns.length, 0, self.settings.crop_train - rows.length]
        return F.pad(tensor, padding), F.pad(target, padding, value=self.ignore_label)


@dataclass(frozen=True)
class SegmentationVal:
    """Makes an image a normalized tensor (3, h, w); its classes (H, W) become int64 and are not scaled.

    Args:
    - `mean`, `std`: of red, green and blue, of values from 0 to 1.
    - `longest_side`: what the longer side of the image is scaled to, up or down, see `scale_to_longest_side`;
      None keeps its size.
    """

    mean: Sequence[float]
    std: Sequence[float]
    longest_side: int | None = None

    def __call__(
        self, image: Image.Image, classes: np.ndarray, pixel: Pixel | None, generator: Random
    ) -> tuple[Tensor, Tensor]:
        """Return the tensor and the target of ``image`` and ``classes``; nothing is cropped, and nothing random."""
        if self.longest_side is not None:
            image = scale_to_longest_side(image, self.longest_side)
        return tvF.normalize(tvF.to_tensor(image), list(self.mean), list(self.std)), torch.from_numpy(classes).long()


def scale_to_longest_side(image: Image.Image, longest_side: int) -> Image.Image:
    """Return ``image`` scaled bilinearly to a longer side of ``longest_side`` px; fractions of a pixel are cut off.

    As in the original project's script, whose input the published network was scored with, both sides are products of
    floats. With 2048 px the longer side of one image size in nine comes out just below that, and is one pixel less.

    Raises DataError where the result would have no pixels, or more than an image may have.
    """
    factor = longest_side / max(image.size)
    width, height = (int(side * factor) for side in image.size)
    if min(width, height) < 1 or width * height > MAX_PIXELS:
        raise DataError(
            f"an image of {image.width} x {image.height} px would be scaled to {width} x {height} px; "
            f"segmentation.longest_side_val = {longest_side}: it has to give between 1 and {MAX_PIXELS:,} px"
        )
    return image.resize((width, height), Image.Resampling.BILINEAR)


class _Axis(NamedTuple):
    """The part of one side of an image that becomes the crop.

    Args:
    - `side`: pixels of the image.
    - `scaled`: pixels of the scaled image.
    - `first`: first pixel of the crop in the scaled image.
    - `length`: pixels of the crop.
    """

    side: int
    scaled: int
    first: int
    length: int

    @property
    def start(self) -> float:
        """Where the crop begins, in pixels of the image."""
        return self.first * self.side / self.scaled

    @property
    def end(self) -> float:
        """Where the crop ends, in pixels of the image."""
        return (self.first + self.length) * self.side / self.scaled

    def nearest(self) -> np.ndarray:
        """Return, for each pixel of the crop, the pixel of the image that its center lies in."""
        centers = 2 * np.arange(self.first, self.first + self.length, dtype=np.int64) + 1
        return centers * self.side // (2 * self.scaled)


def _drawn_axis(side: int, factor: float, crop: int, pixel: int | None, generator: Random) -> _Axis:
    """Return a part of ``crop`` pixels, drawn among all, or among those that contain the scaled ``pixel``."""
    scaled = max(1, round(side * factor))
    least, most = 0, max(0, scaled - crop)
    if pixel is not None:
        place = (2 * pixel + 1) * scaled // (2 * side)
        least, most = max(least, place - crop + 1), min(most, place)
    return _Axis(side, scaled, generator.randint(least, most), min(crop, scaled))
