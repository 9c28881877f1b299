"""From the bytes of an image file to a crop, with the bits of PIL, which the published scores were measured with.

torchvision decodes JPEG files with the same library, and `zoo.ops.resample` resizes as PIL does, both faster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFile, JpegImagePlugin
from torch import Tensor
from torchvision import io as tvio
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.config.limits import Interpolation
from zoo.data.reading import decode_as, load_rgb
from zoo.ops.resample import resize_image

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


def open_pixels(encoded: bytes, name: str) -> Pixels:
    """Return an encoded image in RGB.

    torchvision decodes JPEG files of one or three components; PIL decodes all other files. Raises
    `zoo.data.reading.Unreadable` with the file's ``name``.
    """

    def decode(image: ImageFile.ImageFile) -> Pixels:
        is_plain = isinstance(image, JpegImagePlugin.JpegImageFile) and image.mode in ("L", "RGB")
        if not is_plain or _JPEG_OPERATOR is None:
            return PILPixels(load_rgb(image))
        try:
            content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            return TensorPixels(_JPEG_OPERATOR(content, tvio.ImageReadMode.RGB.value, False))
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
        """Return the image resized: uint8 with PIL's bits, and if bicubic, by PIL; bicubic floats are clamped."""
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


# An image of ``height`` x ``width`` px that can be cropped, and resized with antialiasing. ``resized`` returns only a
# part of the result if it gets a ``window``.
Pixels = PILPixels | TensorPixels
