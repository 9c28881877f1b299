"""Resizing and cropping of validation images as timm and torchvision do it, besides bilinear center crops.

Tested by tests/models/test_own_preprocessing.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.spec.limits import CropMode, Interpolation

PlainImage = Image.Image | Tensor


def resize_by_mode(image: PlainImage, scale: int, interpolation: Interpolation, crop_mode: CropMode) -> PlainImage:
    """Return ``image`` resized for a center crop.

    - `scale`: length in px of the shorter side ("center"), the longer side ("border"), or both sides ("squash").
    - `image`: a PIL image, or a floating-point tensor (3, H, W), whose bicubic values may exceed 0 to 1.
    """
    if crop_mode == "center":
        size = [scale]
    elif crop_mode == "squash":
        size = [scale, scale]
    else:
        _, height, width = tvF.get_dimensions(image)
        ratio = max(height, width) / scale
        size = [round(height / ratio), round(width / ratio)]
    resized: PlainImage = tvF.resize(image, size, InterpolationMode(interpolation))
    return resized


def pad_to_crop(image: PlainImage, crop: int, color: Sequence[float]) -> PlainImage:
    """Return ``image`` with borders of ``color`` (0 to 1) where it is smaller than a square of ``crop`` px."""
    _, height, width = tvF.get_dimensions(image)
    across, down = max(0, crop - width), max(0, crop - height)
    if not across and not down:
        return image
    padding = [across // 2, down // 2, (across + 1) // 2, (down + 1) // 2]
    if isinstance(image, Image.Image):
        bordered: Image.Image = tvF.pad(image, padding, fill=tuple(round(255 * value) for value in color))
        return bordered
    padded = [tvF.pad(channel[None], padding, fill=value) for channel, value in zip(image, color, strict=True)]
    return torch.cat(padded)
