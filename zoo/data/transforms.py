"""The transforms from an image file to the input of a network, as the published networks were trained and scored.

All random numbers are drawn from torch's global CPU generator, so that its seed decides the result. Files are read as
PIL images; the transforms also take arrays and tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as tv
from torchvision.transforms import functional as tvF

from zoo.config import Input
from zoo.data.augmentation import ColorJitter, Cutout, Lighting, PadCrop
from zoo.data.reading import decode_as, load_rgb, to_rgb
from zoo.errors import ConfigError, DataError
from zoo.limits import MAX_PIXELS, MAX_SIDE

KEEP_SCALE = -1
BILINEAR = tv.InterpolationMode.BILINEAR
ACCEPTED = (
    "give a PIL image, a uint8 array (H, W, 3), or a tensor (C, H, W) or (N, C, H, W) of 1 or 3 channels, uint8 or "
    "floating-point with values between 0 and 1"
)

ImageLike = Image.Image | np.ndarray | Tensor
Transform = Callable[[ImageLike], Tensor]


def train_transform(settings: Input) -> Transform:
    """Return the training transform of an experiment's ``input``: image -> normalised (3, crop, crop).

    These are the steps; the settings decide about those in brackets: [shorter side to scale_train] -> crop of 0.08 to 1
    of the area with an aspect ratio of 3/4 to 4/3, resized to crop_train -> mirrored in half of the cases -> values
    from 0 to 1 -> [colour jitter] -> [lighting] -> normalised -> [cutout]. With ``pad_train`` the crop is cut out of
    the padded image, is not resized, and comes after the normalisation.
    """
    steps: list[Callable[[Any], Any]] = [ToRGB(), *_resize(settings.scale_train)]
    if settings.pad_train is None:
        steps += [tv.RandomResizedCrop(settings.crop_train, interpolation=BILINEAR)]
    steps += [tv.RandomHorizontalFlip(), ToTensor()]
    if settings.color_jitter_train:
        steps += [ColorJitter()]
    if settings.lighting_train:
        steps += [Lighting()]
    steps += [tv.Normalize(settings.mean, settings.std)]
    if settings.pad_train is not None:
        steps += [PadCrop(settings.crop_train, settings.pad_train, settings.pad_mode_train)]
    if settings.cutout_train:
        steps += [Cutout(settings.cutout_train)]
    return RandomCompose(steps)


def val_transform(
    scale: int, crop: int, mean: Sequence[float], std: Sequence[float], ten_crops: bool = False
) -> Transform:
    """Return the validation transform: image -> normalised (3, crop, crop), or (10, 3, crop, crop).

    The shorter side is resized to ``scale`` px (-1 keeps the size), then the centre of ``crop`` px is cut out, or with
    ``ten_crops`` the four corners and the centre, and their mirror images. Raises ConfigError when the crop is larger
    than the scale, or one of them is larger than any image may be. The transform raises DataError when the crop is
    larger than an image that is not scaled, which torchvision would pad with black.
    """
    if max(scale, crop) > MAX_SIDE:
        raise ConfigError(
            f"a square of {max(scale, crop)} px has more than the {MAX_PIXELS:,} px that an image may have; crop and "
            f"scale of validation: give at most {MAX_SIDE}"
        )
    if scale != KEEP_SCALE and crop > scale:
        raise ConfigError(
            f"a crop of {crop} px does not fit into images scaled to {scale} px; crop and scale of validation: "
            f"scale to {crop} px or more, or crop {scale} px or less"
        )
    steps: list[Callable[[Any], Any]] = [ToRGB(), *_resize(scale), CheckSize(crop, scale)]
    steps += [ToTensor(), TenCrops(crop)] if ten_crops else [tv.CenterCrop(crop), ToTensor()]
    return tv.Compose([*steps, tv.Normalize(list(mean), list(std))])


def prepare(encoded: bytes, name: str, transform: Transform) -> Tensor:
    """Return the image that the bytes ``encoded`` of the file ``name`` hold, transformed.

    Raises DataError, with the file's name, if that is impossible.
    """
    image = decode_as(encoded, name, load_rgb, "an image")
    try:
        return transform(image)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


class RandomCompose(tv.Compose):
    """Transforms in order, some of them random. Each image of a batch goes through them separately."""

    def __call__(self, image: ImageLike) -> Tensor:
        """Return the image after all steps, or the images of a batch, stacked."""
        if isinstance(image, Tensor) and image.dim() == 4 and len(image) > 0:
            return torch.stack([super(RandomCompose, self).__call__(one) for one in image])
        return super().__call__(image)


@dataclass(frozen=True)
class ToRGB:
    """Gives an image three channels: as PIL image, or as float32 tensor with values in [0, 1] if it is a tensor."""

    def __call__(self, image: ImageLike) -> Image.Image | Tensor:
        """Return the RGB form of ``image``; DataError for anything but an image."""
        if isinstance(image, Tensor):
            return _rgb_tensor(image)
        if isinstance(image, np.ndarray):
            image = _from_array(image)
        if not isinstance(image, Image.Image):
            hint = "open it with PIL.Image.open" if isinstance(image, (str, os.PathLike)) else ACCEPTED
            raise DataError(f"an image is needed, not a {type(image).__name__}; zoo.transforms: {hint}")
        if 0 in image.size:
            raise DataError(f"an image of {image.width} x {image.height} px has no pixels; zoo.transforms: {ACCEPTED}")
        try:
            return to_rgb(image)
        except ValueError as error:
            raise DataError(f"{error}; zoo.transforms: {ACCEPTED}") from error


@dataclass(frozen=True)
class ToTensor:
    """Makes a PIL image a tensor (3, h, w) with values in [0, 1]; leaves a tensor as it is."""

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Return the tensor."""
        return image if isinstance(image, Tensor) else tvF.to_tensor(image)


@dataclass(frozen=True)
class Resize:
    """Scales an image until its shorter side has ``size`` px; DataError where it would have too many pixels then.

    A long and thin image of a few bytes could fill the memory otherwise.
    """

    size: int

    def __call__(self, image: Image.Image | Tensor) -> Image.Image | Tensor:
        """Return the scaled ``image``."""
        width, height = tvF.get_image_size(image)
        longer = self.size * max(width, height) // min(width, height)
        if self.size * longer > MAX_PIXELS:
            raise DataError(
                f"an image of {width} x {height} px would be resized to {self.size} x {longer} px, more than "
                f"{MAX_PIXELS:,} px; scale: make it smaller, or cut the image"
            )
        return tvF.resize(image, [self.size], interpolation=BILINEAR)


@dataclass(frozen=True)
class CheckSize:
    """Passes an image on, or raises DataError when a crop does not fit into it."""

    crop: int
    scale: int

    def __call__(self, image: Image.Image | Tensor) -> Image.Image | Tensor:
        """Return ``image`` itself."""
        width, height = tvF.get_image_size(image)
        shorter = min(width, height)
        if shorter < self.crop:
            raise DataError(
                f"a crop of {self.crop} px does not fit into an image of {width} x {height} px (scale "
                f"{self.scale}); validation: crop {shorter} px or less, or scale to {self.crop} px or more"
            )
        return image


@dataclass(frozen=True)
class TenCrops:
    """Cuts four corners and the centre out of images, and mirrors each."""

    crop: int

    def __call__(self, image: Tensor) -> Tensor:
        """Return (..., 10, 3, crop, crop) of ``image`` (..., 3, h, w)."""
        return torch.stack(tvF.ten_crop(image, self.crop), dim=-4)


def _resize(scale: int) -> list[Resize]:
    return [] if scale == KEEP_SCALE else [Resize(scale)]


def _rgb_tensor(image: Tensor) -> Tensor:
    if image.dim() not in (3, 4) or image.shape[-3] not in (1, 3) or image.numel() == 0:
        raise DataError(f"a tensor of shape {tuple(image.shape)} is no image; zoo.transforms: {ACCEPTED}")
    if image.dtype == torch.uint8:
        image = image.float() / 255
    elif not image.is_floating_point():
        raise DataError(f"a tensor of {image.dtype} does not say what white is; zoo.transforms: {ACCEPTED}")
    else:
        image = image.float()
        least, most = (value.item() for value in image.aminmax())
        if not (least >= 0 and most <= 1):  # also true for NaN
            raise DataError(f"a tensor has values from {least:.4f} to {most:.4f}; zoo.transforms: {ACCEPTED}")
    return image.expand(*image.shape[:-3], 3, -1, -1)


def _from_array(image: np.ndarray) -> Image.Image:
    if image.dtype != np.uint8:
        raise DataError(f"an array of {image.dtype} does not say what white is; zoo.transforms: {ACCEPTED}")
    if image.size == 0 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (1, 3, 4))):
        raise DataError(f"an array of shape {image.shape} is no image; zoo.transforms: {ACCEPTED}")
    return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image)
