"""Random changes of the colors of training images, as for the published networks, and of the visible part of them.

`finish` changes the colors of a whole batch, on the network's device; `PadCrop` and `Cutout` are for normalized values
of small images, which are not resized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import DataError
from zoo.limits import MAX_PIXELS

Colors = tuple[
    float, ...
]  # factors of saturation, brightness and contrast, and the red, green and blue that are added

JITTER = 0.4
GRAY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue

# The principal components of ImageNet's colors and their standard deviations, copied from the original trainer.
LIGHTING_STD = 0.1
LIGHTING_VALUES = (0.2175, 0.0188, 0.0045)
LIGHTING_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
PAD_MODES = {"zeros": "constant", "reflect": "reflect"}  # from the words of an experiment to those of torch


def draw_colors(jitter: bool, lighting: bool, generator: Random) -> Colors | None:
    """Return a random change of an image's colors for `finish`; None if nothing is to change.

    - `jitter`: saturation, brightness and contrast get factors of 1 + U(-0.4, 0.4) each.
    - `lighting`: one color is added to the whole image, E (alpha * lambda) with alpha ~ N(0, 0.1^2) per principal
      component of ImageNet's colors.
    - `generator`: where the random numbers come from.
    """
    if not (jitter or lighting):
        return None
    factors = [generator.uniform(1 - JITTER, 1 + JITTER) for _ in range(3)] if jitter else (1.0,) * 3
    if not lighting:
        return (*factors, 0.0, 0.0, 0.0)
    shares = [generator.gauss(0, LIGHTING_STD) * value for value in LIGHTING_VALUES]
    color = [sum(share * part for share, part in zip(shares, row, strict=True)) for row in LIGHTING_VECTORS]
    return (*factors, *color)


class Normalization(NamedTuple):
    """Mean and standard deviation of red, green and blue, of values from 0 to 1."""

    mean: Sequence[float]
    std: Sequence[float]


def finish(images: Tensor, colors: Tensor | None, normalization: Normalization) -> Tensor:
    """Return images as a network takes them: float32 values from 0 to 1, colors changed, normalized.

    Each change of saturation, brightness or contrast is: image * a + other * (1 - a), where other is the gray of each
    pixel, black, or the mean of the gray image. The original trainer draws an order of the three for each image; but as
    nothing is clamped, and the weights of gray add up to 1, they commute, and together are one affine map:
    b c (s x + (1 - s) gray(x)) + b (1 - c) mean(gray(x)) + color.

    Args:
    - `images`: (N, ..., 3, h, w), uint8, or float32 between 0 and 1. Not changed.
    - `colors`: (N, 6): the factors s, b and c of saturation, brightness and contrast, and the color that is added;
      for images (N, 3, h, w). None changes no color, and gives the bits of torchvision's ToTensor and Normalize.
    - `normalization`: what is subtracted and divided by.
    """
    white = 255 if images.dtype == torch.uint8 else 1
    shift, scale = (torch.tensor(list(values), device=images.device)[:, None, None] for values in normalization)
    if colors is None:
        return images.div(white).sub_(shift).div_(scale)
    saturation, brightness, contrast = (colors[:, place, None, None, None] for place in range(3))
    weights = torch.tensor(GRAY_WEIGHTS, device=images.device)[:, None, None]
    # Whole numbers have the same sum in any order, so that the result does not depend on the number of threads.
    sums = images.sum(dim=(2, 3), keepdim=True, dtype=torch.int64 if white == 255 else torch.float64)
    mean_gray = (sums * weights.double()).sum(dim=1, keepdim=True).float() / (images[0, 0].numel() * white)
    values = images.float()
    gray = values[:, :1] * weights[0] + values[:, 1:2] * weights[1] + values[:, 2:] * weights[2]
    constant = brightness * (1 - contrast) * mean_gray + colors[:, 3:, None, None] - shift
    values = values * (brightness * contrast * saturation / (white * scale))
    values += gray * (brightness * contrast * (1 - saturation) / (white * scale))
    return values.add_(constant / scale)


@dataclass(frozen=True)
class PadCrop:
    """Pads an image by ``pad`` px on each side and cuts ``crop`` x ``crop`` px out of it at random.

    ``mode`` "zeros" fills the border with 0, the mean color of normalized values; "reflect" mirrors the image at its
    edges.
    """

    crop: int
    pad: int
    mode: str

    def __call__(self, image: Tensor, generator: Random) -> Tensor:
        """Return (C, crop, crop) of ``image`` (C, h, w); DataError if it is too small, or too large when padded."""
        height, width = image.shape[-2:]
        self._check(height, width)
        image = F.pad(image, [self.pad] * 4, PAD_MODES[self.mode])
        top, left = (generator.randrange(side + 2 * self.pad - self.crop + 1) for side in (height, width))
        return image[:, top : top + self.crop, left : left + self.crop]

    def _check(self, height: int, width: int) -> None:
        side = min(height, width)
        if (height + 2 * self.pad) * (width + 2 * self.pad) > MAX_PIXELS:
            raise DataError(
                f"an image of {width} x {height} px with {self.pad} px on each side would have more than "
                f"{MAX_PIXELS:,} px; input: a smaller pad_train"
            )
        if side + 2 * self.pad < self.crop:
            raise DataError(
                f"a crop of {self.crop} px does not fit into an image of {width} x {height} px with {self.pad} px on "
                "each side; input: a smaller crop_train, a larger pad_train, or images scaled by scale_train"
            )
        if self.mode == "reflect" and self.pad >= side:
            raise DataError(
                f"an image of {width} x {height} px cannot be reflected by {self.pad} px; input: a pad_train below "
                f"{side}, or images scaled by scale_train"
            )


@dataclass(frozen=True)
class Cutout:
    """Sets a square of ``side`` px, placed at random inside an image, to 0, the mean color of normalized values."""

    side: int

    def __call__(self, image: Tensor, generator: Random) -> Tensor:
        """Return a copy of ``image`` (C, h, w) with the square blanked."""
        top, left = (generator.randrange(length - self.side + 1) for length in image.shape[-2:])
        image = image.clone()
        image[:, top : top + self.side, left : left + self.side] = 0
        return image
