"""Decoders of images: from the bytes of a file to a crop, with PIL or torchvision, bit-identical.

The published scores were measured with PIL. torchvision decodes JPEG files with the same library, and
`zoo.ops.resample` resizes as PIL does, so the faster decoder changes no bit of an image.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image, ImageFile, JpegImagePlugin
from torch import Tensor
from torchvision import io as tvio
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.config import Decoder
from zoo.data.reading import decode_as, load_rgb
from zoo.ops.resample import resize_image
from zoo.spec.limits import Interpolation

# The operator behind torchvision.io.decode_jpeg, which is deprecated and warns. Without it, PIL decodes all files into
# the same pixels.
_JPEG_OPERATOR = getattr(torch.ops.image, "decode_jpeg", None)
PIL_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Pixels(Protocol):
    """An image of ``height`` x ``width`` px that can be cropped and resized."""

    height: int
    width: int

    def part(self, box: Box) -> Pixels:
        """Return the part ``box`` of the image."""
        ...

    def resized(
        self, height: int, width: int, window: Box | None = None, interpolation: Interpolation = "bilinear"
    ) -> Pixels:
        """Return the image resized with antialiasing; with a ``window``, only that part of the result."""
        ...

    def tensor(self) -> Tensor:
        """Return the pixels (3, height, width), uint8, or float32 between 0 and 1 for floating-point images."""
        ...


def open_pixels(encoded: bytes, name: str, decoder: Decoder) -> Pixels:
    """Return an encoded image in RGB.

    "torchvision" decodes JPEG files of one or three components; PIL decodes all other files. Raises
    `zoo.data.reading.Unreadable` with the file's ``name``.
    """

    def decode(image: ImageFile.ImageFile) -> Pixels:
        is_plain = isinstance(image, JpegImagePlugin.JpegImageFile) and image.mode in ("L", "RGB")
        if decoder == "pil" or not is_plain or _JPEG_OPERATOR is None:
            return PILPixels(load_rgb(image))
        try:
            content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            return ByteTensorPixels(_JPEG_OPERATOR(content, tvio.ImageReadMode.RGB.value, False))
        except RuntimeError as error:  # "decode_jpeg, FILE:LINE, what is wrong"
            raise ValueError(str(error).rpartition(", ")[2]) from error

    return decode_as(encoded, name, decode, "an image")


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
        """Return the image resized."""
        resized = PILPixels(self.image.resize((width, height), PIL_FILTERS[interpolation]))
        return resized if window is None else resized.part(window)

    def tensor(self) -> Tensor:
        """Return the pixels, uint8."""
        return torch.from_numpy(np.array(self.image)).permute(2, 0, 1)


class FloatPixels:
    """A tensor (3, H, W), float32 between 0 and 1. Values are not rounded to 8 bits."""

    def __init__(self, image: Tensor) -> None:
        self.image = image
        self.height, self.width = image.shape[-2:]

    def part(self, box: Box) -> FloatPixels:
        """Return a part of the image."""
        return FloatPixels(_cut(self.image, box))

    def resized(
        self, height: int, width: int, window: Box | None = None, interpolation: Interpolation = "bilinear"
    ) -> FloatPixels:
        """Return the image resized; bicubic values are clamped to 0 and 1."""
        image = tvF.resize(self.image, [height, width], InterpolationMode(interpolation), antialias=True)
        resized = FloatPixels(image.clamp(0, 1) if interpolation == "bicubic" else image)
        return resized if window is None else resized.part(window)

    def tensor(self) -> Tensor:
        """Return the pixels, float32."""
        return self.image


class ByteTensorPixels:
    """A tensor (3, H, W), uint8."""

    def __init__(self, image: Tensor) -> None:
        self.image = image
        self.height, self.width = image.shape[-2:]

    def part(self, box: Box) -> ByteTensorPixels:
        """Return a part of the image, without a copy."""
        return ByteTensorPixels(_cut(self.image, box))

    def resized(
        self, height: int, width: int, window: Box | None = None, interpolation: Interpolation = "bilinear"
    ) -> ByteTensorPixels:
        """Return the image resized with PIL's bits, and if bicubic, by PIL."""
        if interpolation == "bicubic":
            image = PILPixels(Image.fromarray(self.image.permute(1, 2, 0).contiguous().numpy()))
            return ByteTensorPixels(image.resized(height, width, window, interpolation).tensor())
        return ByteTensorPixels(resize_image(self.image, (height, width), window))

    def tensor(self) -> Tensor:
        """Return the pixels, uint8."""
        return self.image


def _cut(image: Tensor, box: Box) -> Tensor:
    return image[..., box.top : box.top + box.height, box.left : box.left + box.width]
