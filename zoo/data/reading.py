"""Reading image files: one as 8-bit RGB, and many of them at once."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from PIL import Image, ImageFile

from zoo.errors import DataError, printable
from zoo.limits import MAX_PIXELS

# The formats that are read, by PIL's names, and the extensions of image files, which are those of torchvision. PIL
# knows many more formats, and passes one of them, EPS, on to another program.
FORMATS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "PPM": (".ppm", ".pgm"),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
}
EXTENSIONS = tuple(extension for extensions in FORMATS.values() for extension in extensions)
Image.init()  # fills Image.OPEN

LONGEST_START = 16  # PIL tells the formats apart by at most so many bytes at the beginning of a file

MAX_16_BIT = 65535

CHUNK = 1024  # files that wait for a thread at a time, as a million of them would fill the memory

S = TypeVar("S")
T = TypeVar("T")


def read_image(path: Path) -> Image.Image:
    """Return the image in ``path`` as 8-bit RGB; DataError with the file's name when it cannot be read.

    As for the published numbers, an orientation noted in EXIF is not applied, and the missing part of a truncated image
    is not filled in. An image of more than 89,478,485 pixels is refused before the pixels take memory, and anything
    but a regular file before anything is read from it.
    """
    return read_as(path, _loaded_rgb, "an image")


def read_as(path: Path, convert: Callable[[ImageFile.ImageFile], T], what: str) -> T:
    """Return ``convert`` of the image in ``path``; DataError with ``what`` and the file's name if that is impossible.

    ``convert`` is given the image before its pixels are read, and has to read them, as the file is closed behind it.
    What it raises counts as a fault of the file.
    """
    try:
        # Opening a pipe would wait for its writer.
        with open(path, "rb", opener=_open_without_waiting) as file, _open_image(file) as image:
            return convert(image)
    except MemoryError:
        raise  # the fault is the machine's and not the image's
    except Exception as error:  # PIL's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(f"{what} cannot be read: {_reason(error)}; {printable(path)}") from error


def read_many(read: Callable[[S], T], files: Sequence[S], workers: int) -> Iterator[T]:
    """Yield ``read(file)`` of each of the files in their order, by ``workers`` threads, or one where there are none.

    Most of the time a thread waits for the disk or unpacks pixels, and leaves Python's lock to the others.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, len(files), CHUNK):
            yield from pool.map(read, files[start : start + CHUNK])


def _loaded_rgb(image: Image.Image) -> Image.Image:
    image.load()
    return to_rgb(image)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no O_NONBLOCK


def _open_image(file: BinaryIO) -> ImageFile.ImageFile:
    """Return the image in ``file``, whose pixels are not read yet.

    PIL's own `Image.open` asks the formats in the same way, but prints a warning about images that are refused here.
    """
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise ValueError("it is not a regular file")
    start = file.read(LONGEST_START).ljust(LONGEST_START, b"\0")
    for name in FORMATS:
        factory, accepts = Image.OPEN[name]
        if accepts is not None and accepts(start) is True:
            file.seek(0)
            image = factory(file, "")
            if not 0 < math.prod(image.size) <= MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} px, not between 1 and {MAX_PIXELS:,}")
            return image
    raise ValueError(f"it is empty, or in none of the formats {', '.join(FORMATS)}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Return ``image`` as 8-bit RGB (the same object when it is that already); transparency is dropped.

    Of 16-bit gray values the upper 8 bits are kept, where PIL alone would clip nearly everything to white. Raises
    ValueError for floating-point and wider values, because they do not define which value is white.
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
    """Return what is wrong with a file in one line, without the file's name, which the system's own text repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(" ".join(str(error).split())) or type(error).__name__
