"""Decodes, crops and resizes image files, bit-identical to PIL, with which the published scores were measured.

torchvision and TorchCodec decode JPEG files with the same library as PIL, and `zoo.ops.resample` resizes like PIL. Both
are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFile, JpegImagePlugin
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.config.limits import Interpolation
from zoo.data.reading import decode_as, load_rgb
from zoo.ops.resample import resize_image

RGB = 3  # torchvision.io.ImageReadMode.RGB, which is deprecated with the functions that take it
PIL_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def open_pixels(encoded: bytes, name: str) -> Pixels:
    """Decode an image to RGB.

    `_jpeg_decoder` decodes JPEG files of one or three components; PIL decodes all other files into the same pixels.
    Raises `zoo.data.reading.Unreadable` with the file's ``name``.
    """

    def decode(image: ImageFile.ImageFile) -> Pixels:
        is_plain = isinstance(image, JpegImagePlugin.JpegImageFile) and image.mode in ("L", "RGB")
        decode_jpeg = _jpeg_decoder() if is_plain else None
        if decode_jpeg is None:
            return PILPixels(load_rgb(image))
        try:
            return TensorPixels(decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8)))
        except RuntimeError as error:  # "decode_jpeg, FILE:LINE, what is wrong"
            raise ValueError(str(error).rpartition(", ")[2]) from error

    return decode_as(encoded, name, decode, "an image")


@cache
def _jpeg_decoder() -> Callable[[Tensor], Tensor] | None:
    """Return a function that decodes the bytes of a JPEG file to (3, H, W) uint8 pixels; None if no package has one.

    torchvision's operator, while it exists, is as fast as its successor in TorchCodec.
    """
    operator = getattr(torch.ops.image, "decode_jpeg", None)
    if operator is not None:
        return lambda content: operator(content, RGB, False)
    try:
        decode_jpeg: Callable[[Tensor], Tensor] = import_module("torchcodec.decoders").decode_jpeg
    except (ImportError, AttributeError, OSError, RuntimeError):  # missing, too old, or built for another torch
        return None
    return decode_jpeg


class PILPixels:
    """A PIL image in RGB."""

    def __init__(self, image: Image.Image) -> None:
        self.image = image
        self.width, self.height = image.size

    def part(self, box: Box) -> PILPixels:
        """Return a part of the image."""
        return PILPixels(self.image.crop((box.left, box.top, box.left + box.width, box.top + box.height)))

    def resized(
        self, height: int, width: int, window: Box | None = None, interpolation: Interpolation = "bilinear"
    ) -> PILPixels:
        """Resize the image."""
        resized = PILPixels(self.image.resize((width, height), PIL_FILTERS[interpolation]))
        return resized if window is None else resized.part(window)

    def tensor(self) -> Tensor:
        """Return the pixels, uint8."""
        return torch.from_numpy(np.array(self.image)).permute(2, 0, 1)


class TensorPixels:
    """A tensor (3, H, W): uint8, or float32 between 0 and 1, whose values are not rounded to 8 bits."""

    def __init__(self, image: Tensor) -> None:
        self.image = image
        self.height, self.width = image.shape[-2:]

    def part(self, box: Box) -> TensorPixels:
        """Return a part of the image, without a copy."""
        return TensorPixels(self.image[..., box.top : box.top + box.height, box.left : box.left + box.width])

    def resized(
        self, height: int, width: int, window: Box | None = None, interpolation: Interpolation = "bilinear"
    ) -> TensorPixels:
        """Resize the image. uint8 values are bit-identical to PIL's; bicubic uses PIL, and clamps floats."""
        if self.image.is_floating_point():
            image = tvF.resize(self.image, [height, width], InterpolationMode(interpolation), antialias=True)
            resized = TensorPixels(image.clamp(0, 1) if interpolation == "bicubic" else image)
            return resized if window is None else resized.part(window)
        if interpolation == "bicubic":
            of_pil = PILPixels(Image.fromarray(self.image.permute(1, 2, 0).contiguous().numpy()))
            return TensorPixels(of_pil.resized(height, width, window, interpolation).tensor())
        return TensorPixels(resize_image(self.image, (height, width), window))

    def tensor(self) -> Tensor:
        """Return the pixels."""
        return self.image


# An image of ``height`` x ``width`` px that can be cropped, and resized with antialiasing. With a ``window``,
# ``resized`` returns only this part of the result.
Pixels = PILPixels | TensorPixels
