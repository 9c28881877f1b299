"""Augmentation of training images: color jitter, lighting, padded crops, cutout and random erasing.

`finish` jitters the colors of a whole batch on the network's device and normalizes it. `pad_crop`, `cut_out` and
`erase_randomly` work on normalized images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.errors import DataError

# Factors of saturation, brightness and contrast, and the values to add to red, green and blue.
Colors = tuple[float, ...]

JITTER = 0.4
GRAY_WEIGHTS = (0.299, 0.587, 0.114)  # weights of red, green and blue

# The principal components of ImageNet's colors and their standard deviations, copied from the original trainer.
LIGHTING_STD = 0.1
LIGHTING_VALUES = (0.2175, 0.0188, 0.0045)
LIGHTING_VECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
ERASED_AREAS = (0.02, 1 / 3)  # range of the area of random erasing, as a fraction of the image
ERASED_LOG_RATIOS = (math.log(0.3), math.log(1 / 0.3))  # range of the log of height / width
ERASE_TRIES = 10
PAD_MODES = {"zeros": "constant", "reflect": "reflect"}  # mode in an experiment -> torch's mode


def draw_colors(jitter: bool, lighting: bool, generator: Random) -> Colors | None:
    """Return random color jitter for one image, to be applied by `finish`; None without jitter and lighting.

    Args:
    - `jitter`: draws factors 1 + U(-0.4, 0.4) of saturation, brightness and contrast.
    - `lighting`: draws one color to add to the whole image, E (alpha * lambda) with alpha ~ N(0, 0.1^2) per principal
      component of ImageNet's colors.
    - `generator`: the source of the random numbers.
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
    """Mean and standard deviation of red, green and blue, for values from 0 to 1."""

    mean: Sequence[float]
    std: Sequence[float]


def finish(images: Tensor, colors: Tensor | None, normalization: Normalization) -> Tensor:
    """Return the input of a network: ``images`` as float32 from 0 to 1, with color jitter, normalized.

    A change of saturation, brightness or contrast is image * a + other * (1 - a), where other is the gray of each
    pixel, black, or the mean of the gray image. The original trainer applies the three in a random order. They commute,
    because nothing is clamped and the gray weights sum to 1, so together they are one affine map:
    b c (s x + (1 - s) gray(x)) + b (1 - c) mean(gray(x)) + color.

    Args:
    - `images`: (N, ..., 3, h, w), uint8, or float32 between 0 and 1. Not mutated.
    - `colors`: (N, 6), the factors s, b and c and the color to add, for images (N, 3, h, w). With None the result is
      bit-identical to torchvision's ToTensor and Normalize.
    - `normalization`: mean and standard deviation.
    """
    white = 255 if images.dtype == torch.uint8 else 1
    shift, scale = (torch.tensor(list(values), device=images.device)[:, None, None] for values in normalization)
    if colors is None:
        return images.div(white).sub_(shift).div_(scale)
    saturation, brightness, contrast = (colors[:, place, None, None, None] for place in range(3))
    weights = torch.tensor(GRAY_WEIGHTS, device=images.device)[:, None, None]
    # Integer sums do not depend on the order of summation, and hence not on the number of threads.
    sums = images.sum(dim=(2, 3), keepdim=True, dtype=torch.int64 if white == 255 else torch.float64)
    mean_gray = (sums * weights.double()).sum(dim=1, keepdim=True).float() / (images[0, 0].numel() * white)
    values = images.float()
    gray = values[:, :1] * weights[0] + values[:, 1:2] * weights[1] + values[:, 2:] * weights[2]
    constant = brightness * (1 - contrast) * mean_gray + colors[:, 3:, None, None] - shift
    values = values * (brightness * contrast * saturation / (white * scale))
    values += gray * (brightness * contrast * (1 - saturation) / (white * scale))
    return values.add_(constant / scale)


def pad_crop(image: Tensor, crop: int, pad: int, mode: str, generator: Random) -> Tensor:
    """Return a random crop (C, crop, crop) of the padded ``image`` (C, h, w). Raises DataError if it is too small.

    Args:
    - `crop`: side of the crop, px.
    - `pad`: padding on each side, px.
    - `mode`: "zeros" pads with 0, the mean color of normalized images; "reflect" mirrors the image at its edges.
    """
    height, width = image.shape[-2:]
    side = min(height, width)
    if side + 2 * pad < crop or (mode == "reflect" and pad >= side):
        what = f"an image of {width} x {height} px is too small for a crop of {crop} px"
        raise DataError(f"{what} with {pad} px of padding ({mode})", "input", "set scale_train")
    image = F.pad(image, [pad] * 4, PAD_MODES[mode])
    top, left = (generator.randrange(side + 2 * pad - crop + 1) for side in (height, width))
    return image[:, top : top + crop, left : left + crop]


def cut_out(image: Tensor, side: int, generator: Random) -> Tensor:
    """Return a copy of ``image`` (C, h, w) with a random square of ``side`` px set to 0, the mean color."""
    top, left = (generator.randrange(length - side + 1) for length in image.shape[-2:])
    image = image.clone()
    image[:, top : top + side, left : left + side] = 0
    return image


def erase_randomly(image: Tensor, probability: float, mode: str, generator: Random) -> Tensor:
    """With this ``probability``, return a copy of ``image`` (C, h, w) with an erased rectangle, otherwise ``image``.

    The rectangle has the distribution of Zhong et al. 2020 and is drawn like in timm's RandomErasing. ``mode`` sets the
    values of erased pixels: 0 ("const"), one normally distributed color ("rand"), or a normally distributed color for
    each pixel ("pixel").
    """
    if generator.random() > probability:
        return image
    channels, height, width = image.shape
    for _ in range(ERASE_TRIES):
        area = generator.uniform(*ERASED_AREAS) * height * width
        ratio = math.exp(generator.uniform(*ERASED_LOG_RATIOS))
        rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if rows < height and columns < width:
            top, left = generator.randint(0, height - rows), generator.randint(0, width - columns)
            image = image.clone()
            values = _erased_values((channels, rows, columns), mode, generator)
            image[:, top : top + rows, left : left + columns] = values
            break
    return image


def _erased_values(shape: tuple[int, int, int], mode: str, generator: Random) -> Tensor | float:
    if mode == "const":
        return 0.0
    noise = torch.Generator().manual_seed(generator.getrandbits(63))
    return torch.randn(shape if mode == "pixel" else (shape[0], 1, 1), generator=noise)
