"""Transforms from an image file to the input of a network, as used to train and score the published networks.

A transform has two stages. `Transform.draw` runs in the data loader's workers: it decodes, crops, resizes, and draws
the random numbers. `zoo.data.transforms.augmentation.finish` runs on the network's device for a whole batch: it jitters
colors and normalizes. Calling a transform with an image runs both, with random numbers from torch's global generator.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.config.experiment import Input
from zoo.config.limits import MAX_PIXELS, CropMode, Interpolation
from zoo.data.reading import Unreadable, to_rgb
from zoo.data.seeding import random_of_torch
from zoo.data.transforms.augmentation import (
    Colors,
    Normalization,
    cut_out,
    draw_colors,
    erase_randomly,
    finish,
    pad_crop,
)
from zoo.data.transforms.pixels import Box, PILPixels, Pixels, TensorPixels, open_pixels
from zoo.data.transforms.policies import Policy
from zoo.errors import ConfigError, DataError

KEEP_SCALE = -1
AREAS = (0.08, 1.0)  # range of the area of a training crop, as a fraction of the image
ASPECT_RATIOS = (3 / 4, 4 / 3)  # range of the aspect ratio of a training crop, width / height
CROP_TRIES = 10
ACCEPTED = (
    "give a PIL image, a uint8 array (H, W, 3), or a tensor (C, H, W) or (N, C, H, W) of 1 or 3 channels, uint8 or "
    "floating-point with values between 0 and 1"
)

ImageLike = Image.Image | np.ndarray | Tensor


class Drawn(NamedTuple):
    """The output of `Transform.draw`: a crop, and the operations that `finish` still has to apply.

    Args:
    - `pixels`: (..., 3, h, w), uint8 or float32 between 0 and 1; float32 of any range if already normalized.
    - `colors`: the color jitter, see `zoo.data.transforms.augmentation.finish`; None for no jitter.
    - `normalization`: mean and standard deviation; None if ``pixels`` are already normalized.
    """

    pixels: Tensor
    colors: Colors | None = None
    normalization: Normalization | None = None

    def finished(self) -> Tensor:
        """Return the input of the network, float32 (..., 3, h, w)."""
        if self.normalization is None:
            return self.pixels
        colors = None if self.colors is None else torch.tensor([self.colors])
        return finish(self.pixels[None], colors, self.normalization)[0]


class Transform(ABC):
    """A transform from an image to the input of a network."""

    @abstractmethod
    def draw(self, image: Pixels, generator: Random) -> Drawn:
        """Return a crop of ``image``, not yet normalized. Raises DataError if the image cannot be cropped."""

    def __call__(self, image: ImageLike) -> Tensor:
        """Return the normalized tensor of an image, float32; for a batch (N, C, H, W), the stacked tensors.

        Raises DataError for anything but an image, and for an image that cannot be transformed.
        """
        if isinstance(image, Tensor) and image.dim() == 4 and len(image) > 0:
            return torch.stack([self(one) for one in image])
        return self.draw(as_pixels(image), random_of_torch()).finished()


def prepare(encoded: bytes, name: str, transform: Transform, generator: Random) -> Drawn:
    """Decode an image and call ``transform.draw`` on it.

    Raises DataError with the file's ``name`` if the image cannot be decoded or transformed.
    """
    try:
        return transform.draw(open_pixels(encoded, name), generator)
    except Unreadable:
        raise
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


@dataclass(frozen=True)
class TrainTransform(Transform):
    """The training transform of an experiment's ``input``: image -> normalized (3, crop, crop).

    The steps, with optional steps in brackets: [resize the shorter side to scale_train] -> crop crop_scale_train of the
    area with an aspect ratio of crop_ratio_train and resize it to crop_train -> flip with probability 1/2 ->
    [automatic augmentation] -> [color jitter in 8 bits] -> scale values to 0..1 -> [color jitter] -> [lighting] ->
    normalize -> [cutout] -> [random erasing]. With ``pad_train``, the image is normalized, padded and cropped, and not
    resized.

    Raises ConfigError like `Policy`.
    """

    settings: Input
    _policy: Policy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_policy", Policy(self.settings))

    def draw(self, image: Pixels, generator: Random) -> Drawn:
        """Return a random crop of ``image``. With padding, cutout or random erasing it is already normalized."""
        settings, side = self.settings, self.settings.crop_train
        interpolation: Interpolation = "bilinear"
        if settings.interpolation_train != "bilinear":
            is_random = settings.interpolation_train == "random"
            interpolation = "bilinear" if is_random and generator.random() < 0.5 else "bicubic"
        if settings.scale_train != KEEP_SCALE:
            image = image.resized(*_scaled_size(image, settings.scale_train), interpolation=interpolation)
        if settings.pad_train is None:
            box = random_box(image.height, image.width, generator, settings.crop_scale_train, settings.crop_ratio_train)
            image = image.part(box).resized(side, side, interpolation=interpolation)
        pixels = image.tensor()
        if generator.random() < 0.5:
            pixels = pixels.flip(-1)
        if self._policy.transforms:
            pixels = self._policy(pixels, generator)
        colors = draw_colors(settings.color_jitter_train is True, settings.lighting_train, generator)
        drawn = Drawn(pixels, colors, Normalization(settings.mean, settings.std))
        if settings.pad_train is None and not settings.cutout_train and not settings.random_erasing_train:
            return drawn
        values = drawn.finished()
        if settings.pad_train is not None:
            values = pad_crop(values, side, settings.pad_train, settings.pad_mode_train, generator)
        if settings.cutout_train:
            values = cut_out(values, settings.cutout_train, generator)
        if settings.random_erasing_train:
            probability, mode = settings.random_erasing_train, settings.random_erasing_mode_train
            values = erase_randomly(values, probability, mode, generator)
        return Drawn(values)


@dataclass(frozen=True)
class ValTransform(Transform):
    """The validation transform: image -> normalized (3, crop, crop), or (10, 3, crop, crop) with ten crops.

    Raises DataError for an image that is smaller than the crop.

    Args:
    - `scale`: length of the shorter side after resizing, px; -1 keeps the size.
    - `crop`: side of the center crop, px.
    - `mean`, `std`: mean and standard deviation of red, green and blue, for values from 0 to 1.
    - `ten_crops`: return crops of the four corners and the center, and their mirror images, instead of the center crop.
    - `interpolation`, `crop_mode`: see `zoo.config.network.Preprocessing`.
    """

    scale: int
    crop: int
    mean: Sequence[float]
    std: Sequence[float]
    ten_crops: bool = False
    interpolation: Interpolation = "bilinear"
    crop_mode: CropMode = "center"

    def __post_init__(self) -> None:
        if self.ten_crops and self.crop_mode != "center":
            what = f'ten crops need images that exceed the crop, and crop mode "{self.crop_mode}" resizes both sides'
            raise ConfigError(what, "crop mode of validation", 'take the center crop, or crop mode "center"')

    def draw(self, image: Pixels, generator: Random) -> Drawn:
        """Return the crop or the ten crops of ``image``."""
        keep = self.scale == KEEP_SCALE
        if not keep and (self.interpolation, self.crop_mode) != ("bilinear", "center"):
            image = self._resized_by_mode(image)
            keep = True
        height, width = (image.height, image.width) if keep else _scaled_size(image, self.scale)
        self._check(height, width)
        if self.ten_crops:
            whole = image if keep else image.resized(height, width)
            return self._drawn(torch.stack(tvF.ten_crop(whole.tensor(), self.crop), dim=-4))
        # torchvision's center crop rounds halves to even.
        center = Box(round((height - self.crop) / 2), round((width - self.crop) / 2), self.crop, self.crop)
        return self._drawn((image.part(center) if keep else image.resized(height, width, center)).tensor())

    def _resized_by_mode(self, image: Pixels) -> Pixels:
        """Resize ``image`` with torchvision, like timm and torchvision."""
        size = [self.scale]
        if self.crop_mode == "squash":
            size = [self.scale, self.scale]
        else:
            _scaled_size(image, self.scale)  # raises an error if the result would be too large
            # Scores are measured with PIL images; torchvision resizes 8-bit tensors to slightly different values.
        plain: Image.Image | Tensor = image.image
        if isinstance(plain, Tensor) and not plain.is_floating_point():
            plain = tvF.to_pil_image(plain)
        plain = tvF.resize(plain, size, InterpolationMode(self.interpolation))
        return TensorPixels(plain.clamp(0, 1)) if isinstance(plain, Tensor) else PILPixels(plain)

    def _drawn(self, pixels: Tensor) -> Drawn:
        return Drawn(pixels, normalization=Normalization(self.mean, self.std))

    def _check(self, height: int, width: int) -> None:
        shorter = min(width, height)
        if shorter < self.crop:
            what = f"a crop of {self.crop} px does not fit into an image of {width} x {height} px (scale {self.scale})"
            remedy = f"crop {shorter} px or less, or scale to {self.crop} px or more"
            raise DataError(what, "validation", remedy)


def as_pixels(image: ImageLike) -> Pixels:
    """Convert ``image`` to RGB; tensors become float32 from 0 to 1. Raises DataError for anything but an image."""
    if isinstance(image, Tensor):
        return TensorPixels(_rgb_tensor(image))
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if not isinstance(image, Image.Image):
        hint = "open it with PIL.Image.open" if isinstance(image, (str, os.PathLike)) else ACCEPTED
        raise DataError(f"expected an image, got a {type(image).__name__}", "zoo.transforms", hint)
    if 0 in image.size:
        raise DataError(f"an image of {image.width} x {image.height} px has no pixels", "zoo.transforms", ACCEPTED)
    try:
        return PILPixels(to_rgb(image))
    except ValueError as error:
        raise DataError(error, "zoo.transforms", ACCEPTED) from error


def random_box(
    height: int,
    width: int,
    generator: Random,
    areas: Sequence[float] = AREAS,
    ratios: Sequence[float] = ASPECT_RATIOS,
) -> Box:
    """Return a random box in an image, with the distribution of torchvision's RandomResizedCrop.

    Args:
    - `areas`: smallest and largest area, as a fraction of the image.
    - `ratios`: smallest and largest aspect ratio, width / height.
    """
    log_ratios = [math.log(ratio) for ratio in ratios]
    for _ in range(CROP_TRIES):
        area = height * width * generator.uniform(*areas)
        ratio = math.exp(generator.uniform(*log_ratios))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = generator.randrange(height - box_height + 1)
            left = generator.randrange(width - box_width + 1)
            return Box(top, left, box_height, box_width)
    # Elongated images: the largest centered box with an allowed aspect ratio.
    min_ratio, max_ratio = ratios
    box_width, box_height = min(width, round(height * max_ratio)), min(height, round(width / min_ratio))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def _scaled_size(image: Pixels, size: int) -> tuple[int, int]:
    """Return (height, width) of an image whose shorter side is resized to ``size`` px, rounded as torchvision does.

    Raises DataError if the result has too many pixels: a long, thin image of a few bytes could exhaust the memory.
    """
    shorter, longer = sorted((image.height, image.width))
    scaled = int(size * longer / shorter)
    if size * scaled > MAX_PIXELS:
        resized = f"an image of {image.width} x {image.height} px would be resized to {size} x {scaled} px"
        raise DataError(f"{resized}, more than {MAX_PIXELS:,} px", "scale", "make it smaller, or crop the image")
    return (size, scaled) if image.height <= image.width else (scaled, size)


def _rgb_tensor(image: Tensor) -> Tensor:
    if image.dim() != 3 or image.shape[-3] not in (1, 3) or image.numel() == 0:
        raise DataError(f"a tensor of shape {tuple(image.shape)} is not an image", "zoo.transforms", ACCEPTED)
    if image.dtype == torch.uint8:
        image = image.float() / 255
    elif not image.is_floating_point():
        raise DataError(f"a tensor of {image.dtype} does not define white", "zoo.transforms", ACCEPTED)
    else:
        image = image.float()
        low, high = (value.item() for value in image.aminmax())
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise DataError(f"a tensor has values from {low:.4f} to {high:.4f}", "zoo.transforms", ACCEPTED)
    return image.expand(*image.shape[:-3], 3, -1, -1)


def _from_array(image: np.ndarray) -> Image.Image:
    if image.dtype != np.uint8:
        raise DataError(f"an array of {image.dtype} does not define white", "zoo.transforms", ACCEPTED)
    if image.size == 0 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))):
        raise DataError(f"an array of shape {image.shape} is not an image", "zoo.transforms", ACCEPTED)
    return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
