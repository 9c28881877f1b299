"""Random changes of the colours of training images, as for the published networks, and of the visible part of them.

`ColorJitter` and `Lighting` change values between 0 and 1; `PadCrop` and `Cutout` are for normalised values of small
images, which are not resized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import DataError
from zoo.limits import MAX_PIXELS

JITTER = 0.4
GRAY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue

# The principal components of ImageNet's colours and their standard deviations, copied from the original trainer.
LIGHTING_STD = 0.1
LIGHTING_VALUES = torch.tensor([0.2175, 0.0188, 0.0045])
LIGHTING_VECTORS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
PAD_MODES = {"zeros": "constant", "reflect": "reflect"}  # from the words of an experiment to those of torch


@dataclass(frozen=True)
class ColorJitter:
    """Changes saturation, brightness and contrast, each by its own factor, in an order drawn per image.

    result = image * a + other * (1 - a) with a = 1 + U(-0.4, 0.4); other is the gray of each pixel (saturation), black
    (brightness) or the mean of the gray image (contrast). The order is drawn because the original trainer drew it. As
    nothing is clamped, it affects no more than rounding.
    """

    def __call__(self, image: Tensor) -> Tensor:
        """Return the changed ``image``, (3, h, w)."""
        # Saturation, brightness and contrast.
        factors = (1 + torch.empty(3).uniform_(-JITTER, JITTER)).tolist()
        others = (_gray, lambda _: 0.0, lambda image: float(_gray(image).numpy().mean(dtype=np.float64)))
        for kind in torch.randperm(3).tolist():
            image = image * factors[kind] + others[kind](image) * (1 - factors[kind])
        return image


@dataclass(frozen=True)
class Lighting:
    """Adds one colour to the whole image, drawn along the principal components of ImageNet's colours.

    image + E (alpha * lambda) with alpha ~ N(0, 0.1^2) per component.
    """

    def __call__(self, image: Tensor) -> Tensor:
        """Return the changed ``image``, (3, h, w)."""
        alpha = torch.randn(3) * LIGHTING_STD
        colour = (LIGHTING_VECTORS * (alpha * LIGHTING_VALUES)).sum(dim=1)
        return image + colour[:, None, None]


def _gray(image: Tensor) -> Tensor:
    # A matrix product here, or torch.mean for the mean gray, would have other last bits with another number of threads.
    # An image must not depend on whether a worker (one thread) or the main process drew it.
    red, green, blue = GRAY_WEIGHTS
    return (image[0] * red + image[1] * green + image[2] * blue)[None]


@dataclass(frozen=True)
class PadCrop:
    """Pads an image by ``pad`` px on each side and cuts ``crop`` x ``crop`` px out of it at random.

    ``mode`` "zeros" fills the border with 0, the mean colour of normalised values; "reflect" mirrors the image at its
    edges.
    """

    crop: int
    pad: int
    mode: str

    def __call__(self, image: Tensor) -> Tensor:
        """Return (C, crop, crop) of ``image`` (C, h, w); DataError if it is too small, or too large when padded."""
        height, width = image.shape[-2:]
        self._check(height, width)
        image = F.pad(image, [self.pad] * 4, PAD_MODES[self.mode])
        top, left = (_random_below(side + 2 * self.pad - self.crop + 1) for side in (height, width))
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
    """Sets a square of ``side`` px, placed at random inside an image, to 0, the mean colour of normalised values."""

    side: int

    def __call__(self, image: Tensor) -> Tensor:
        """Return a copy of ``image`` (C, h, w) with the square blanked."""
        top, left = (_random_below(length - self.side + 1) for length in image.shape[-2:])
        image = image.clone()
        image[:, top : top + self.side, left : left + self.side] = 0
        return image


def _random_below(end: int) -> int:
    return int(torch.randint(end, ()))
