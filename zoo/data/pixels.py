"""Decoders of images: from the bytes of a file to a crop, with PIL or torchvision, bit-identical.

The published scores were measured with PIL. torchvision decodes JPEG files with the same library, and
`zoo.ops.resample` resizes as PIL does, so the faster decoder changes no bit of an image.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision import io as tvio
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tvF

from zoo.config import Decoder
from zoo.data.reading import check_size, decode_as, load_rgb, naming
from zoo.ops.resample import resize_box
from zoo.spec.limits import Interpolation

WHAT = "an image"
# The operator behind torchvision.io.decode_jpeg, which is deprecated and warns. Without it, PIL decodes all files into
# the same pixels.
_JPEG_OPERATOR = getattr(torch.ops.image, "decode_jpeg", None)
JPEG_START = b"\xff\xd8\xff"
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # start-of-frame markers; the others in this range define tables
BASELINE_FRAMES = {0xC0, 0xC1}
BLOCK = 8  # rows of the blocks that a JPEG file consists of, before the subsampling of colors

PIL_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class JPEGFrame(NamedTuple):
    """The frame header of a JPEG file.

    Args:
    - `width`, `height`: of the image.
    - `place`: of its marker in the file.
    """

    width: int
    height: int
    place: int


class Pixels(Protocol):
    """An image of ``height`` x ``width`` px that can be cropped and resized, decoded lazily."""

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
    `zoo.data.reading.Unreadable` with the file's ``name``, here or when the image is decoded.
    """
    if decoder != "pil":
        with naming(name, WHAT):
            frame = jpeg_frame(encoded)
        if frame is not None and _JPEG_OPERATOR is not None:
            return JPEGPixels(encoded, name, frame)
    return PILPixels(decode_as(encoded, name, load_rgb, WHAT))


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
        return ByteTensorPixels(resize_box(self.image, (height, width), window=window))

    def tensor(self) -> Tensor:
        """Return the pixels, uint8."""
        return self.image


class JPEGPixels:
    """A JPEG file that torchvision decodes: as a whole, or in workers from the top to the end of the requested part."""

    def __init__(self, encoded: bytes, name: str, frame: JPEGFrame) -> None:
        self.encoded = encoded
        self.name = name
        self.frame = frame
        self.width, self.height = frame[:2]

    def part(self, box: Box) -> ByteTensorPixels:
        """Return a part of the image."""
        return self._decoded(box.top + box.height).part(box)

    def resized(
        self, height: int, width: int, window: Box | None = None, interpolation: Interpolation = "bilinear"
    ) -> ByteTensorPixels:
        """Return the image resized with PIL's bits."""
        return self._decoded().resized(height, width, window, interpolation)

    def tensor(self) -> Tensor:
        """Return the pixels, uint8."""
        return self._decoded().tensor()

    def _decoded(self, end: int | None = None) -> ByteTensorPixels:
        """Return the rows to ``end``, and those below that are decoded with them; default: all."""
        encoded = bytearray(self.encoded)
        rows = None if end is None or get_worker_info() is None else self._rows_to_decode(end)
        if rows is not None:
            place = self.frame.place + 5
            encoded[place : place + 2] = rows.to_bytes(2, "big")
        # libjpeg warns on stderr that more data follows than its rows need. Only workers are silenced: their processes
        # have no other threads that write to stderr.
        silence = nullcontext() if rows is None else _silent_stderr()
        with naming(self.name, WHAT):
            try:
                with silence:
                    return ByteTensorPixels(decode_jpeg(torch.frombuffer(encoded, dtype=torch.uint8)))
            except RuntimeError as error:  # "decode_jpeg, FILE:LINE, what is wrong"
                raise ValueError(str(error).rpartition(", ")[2]) from error

    def _rows_to_decode(self, end: int) -> int | None:
        """Return the height of the smallest image whose rows to ``end`` have the bits of the whole; None for the whole.

        The upsampling of colors reads the row below. Rows are coded in units of blocks of the largest sampling factor.
        """
        place = self.frame.place
        samplings = self.encoded[place + 11 : place + 11 + 3 * self.encoded[place + 9] : 3]
        unit = BLOCK * max((sampling % 16 for sampling in samplings), default=0)
        if self.encoded[place + 1] not in BASELINE_FRAMES or unit == 0:
            return None
        rows = (end // unit + 1) * unit
        return rows if rows < self.frame.height else None


def decode_jpeg(encoded: Tensor) -> Tensor:
    """Return the RGB pixels (3, H, W), uint8, of an encoded JPEG file (n,), uint8, decoded by torchvision."""
    assert _JPEG_OPERATOR is not None
    pixels: Tensor = _JPEG_OPERATOR(encoded, tvio.ImageReadMode.RGB.value, False)
    return pixels


class _silent_stderr:
    """Context manager that suppresses what libraries print on stderr."""

    def __enter__(self) -> None:
        self._stderr = os.dup(2)
        os.dup2(_open_null(), 2)

    def __exit__(self, *error: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)


@lru_cache(maxsize=1)
def _open_null() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def jpeg_frame(encoded: bytes) -> JPEGFrame | None:
    """Return the frame header of an 8-bit JPEG file with one or three components; None for any other file.

    Raises ValueError for too many pixels, before torchvision allocates memory for them.
    """
    if not encoded.startswith(JPEG_START):
        return None
    place = 2
    while place + 9 < len(encoded) and encoded[place] == 0xFF:
        marker = encoded[place + 1]
        if marker in FRAMES:
            height, width = (int.from_bytes(encoded[at : at + 2], "big") for at in (place + 5, place + 7))
            if encoded[place + 4] != 8 or encoded[place + 9] not in (1, 3):
                return None
            check_size(width, height)
            return JPEGFrame(width, height, place)
        # 0xFF bytes may pad a marker. Any other marker is followed by the length of its segment.
        place += 1 if marker == 0xFF else 2 + int.from_bytes(encoded[place + 2 : place + 4], "big")
    return None


def _cut(image: Tensor, box: Box) -> Tensor:
    return image[..., box.top : box.top + box.height, box.left : box.left + box.width]
