"""Changes of a training image's colours, as the published networks were trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

JITTER = 0.4
GRAY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue

# The principal components of ImageNet's colours and their standard deviations, as the original trainer had them.
LIGHTING_STD = 0.1
LIGHTING_VALUES = torch.tensor([0.2175, 0.0188, 0.0045])
LIGHTING_VECTORS = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


@dataclass(frozen=True)
class ColorJitter:
    """Changes saturation, brightness and contrast, each by its own factor, in an order drawn per image.

    result = image * a + other * (1 - a) with a = 1 + U(-0.4, 0.4); other is the gray of each pixel
    (saturation), black (brightness) or the mean of the gray image (contrast). Nothing is clamped, so that the
    order, drawn because the original trainer drew it, decides no more than rounding.
    """

    def __call__(self, image: Tensor) -> Tensor:
        """Return the changed ``image``, (3, h, w)."""
        factors = (1 + torch.empty(3).uniform_(-JITTER, JITTER)).tolist()
        others = (_gray, _black, _mean_gray)
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
    # Not a matrix product and not torch.mean below: how many threads share those decides their last bits, and
    # an image must not depend on whether a worker (one thread) or the main process drew it.
    red, green, blue = GRAY_WEIGHTS
    return (image[0] * red + image[1] * green + image[2] * blue)[None]


def _black(image: Tensor) -> float:
    return 0.0


def _mean_gray(image: Tensor) -> float:
    return float(_gray(image).numpy().mean(dtype=np.float64))
