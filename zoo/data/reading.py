"""Reading one picture file as 8-bit RGB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from zoo.errors import DataError

MAX_16_BIT = 65535


def read_picture(path: Path) -> Image.Image:
    """Return the picture in ``path`` as 8-bit RGB; DataError with the file's name when it cannot be read.

    An orientation noted in EXIF is not applied, and what is missing from a truncated picture is not filled in:
    the published numbers were made so.
    """
    try:
        with open(path, "rb") as file, Image.open(file) as image:
            image.load()
            return to_rgb(image)
    except MemoryError:
        raise  # says something about the machine, not about the picture
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(f"a picture cannot be read: {_reason(error)}; {path}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Return ``image`` as 8-bit RGB (the same object when it is that already); transparency is dropped.

    16-bit gray keeps its upper 8 bits, where PIL alone would clip nearly everything to white. Raises ValueError
    for floating-point and wider pictures, which do not say what white is.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = _gray_8_bit(image)
    elif "transparency" in image.info:
        image = image.convert("RGBA")  # the colours are those of a direct conversion, but PIL does not warn
    return image if image.mode == "RGB" else image.convert("RGB")


def _gray_8_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > MAX_16_BIT:
        raise ValueError(f"what is white is not defined for mode {image.mode} beyond 16 bits")
    return Image.fromarray((values >> 8).astype(np.uint8))


def _reason(error: Exception) -> str:
    """Return what is wrong with a file in one line; PIL's and the system's own words repeat its name."""
    if isinstance(error, UnidentifiedImageError):
        return "it is empty or in no known picture format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
