"""Reading image files as 8-bit RGB."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from zoo.config.limits import MAX_IMAGE_BYTES, MAX_PIXELS
from zoo.errors import DataError, escape
from zoo.files import FILE_SYSTEM_ERRORS, TOO_MANY_FILES, decode_text, open_regular, retry

# PIL's names of the accepted formats, and torchvision's image extensions. PIL supports more formats; one of them, EPS,
# runs an external program.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")

MAX_16_BIT = 65535

WAITS_S = (0.5, 1.0, 2.0, 4.0)  # delays before retries if the file system does not deliver a file

CHUNK = 1024  # files submitted to the threads at a time, to bound memory

S = TypeVar("S")
T = TypeVar("T")


class Unreadable(DataError):
    """A file cannot be read or decoded; the message names it."""


class Unreachable(DataError):
    """A file system or a server does not deliver data; no single image is at fault."""


def read_image(path: str | Path) -> Image.Image:
    """Return the image in ``path`` as 8-bit RGB.

    Ignores the EXIF orientation, as the published scores do. Raises Unreadable for a truncated image, and, before
    memory is allocated, for an image of more than 89,478,485 pixels.
    """
    return read_as(path, load_rgb, "an image")


def read_as(path: str | Path, convert: Callable[[ImageFile.ImageFile], T], what: str) -> T:
    """Read the image in ``path`` and return ``convert(image)``, see `decode_as`."""
    return decode_as(read_bytes(path, what), escape(path), convert, what)


def decode_as(encoded: bytes, name: str, convert: Callable[[ImageFile.ImageFile], T], what: str) -> T:
    """Open an encoded image, without decoding its pixels, and return ``convert(image)``.

    Any exception, including exceptions of ``convert``, is raised as Unreadable: ``what`` in the file ``name`` cannot be
    read.
    """
    with name_faults(name, what), _open_image(encoded) as image:
        return convert(image)


def read_bytes(path: str | Path, what: str = "an image") -> bytes:
    """Read the file ``path``. Raises Unreadable, also if it is too large, and Unreachable like `delivered`."""

    def read() -> bytes:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_IMAGE_BYTES:
                raise ValueError(f"it has {size:,} bytes, more than {MAX_IMAGE_BYTES:,}")
            return file.read()

    with name_faults(escape(path), what):
        return delivered(read, path)


def delivered(read: Callable[[], T], where: object) -> T:
    """Call ``read`` and return its result; retry after file system errors. Raises Unreachable if they persist."""
    try:
        return retry(read, is_of_file_system, WAITS_S, where)
    except OSError as error:
        if not is_of_file_system(error):
            raise
        raise unreachable(error, where) from error


def is_of_file_system(error: Exception) -> bool:
    """Return whether an error comes from the file system or from a limit on open files, not from one file."""
    return isinstance(error, OSError) and error.errno in FILE_SYSTEM_ERRORS


def unreachable(error: OSError, where: object) -> Unreachable:
    """Build the error for data at ``where`` that the file system does not deliver."""
    remedy = "check the disk or the network drive, and try again"
    if error.errno in TOO_MANY_FILES:
        remedy = "--workers: use fewer workers, or allow more open files with ulimit -n"
    return Unreachable(f"the file system answered: {error.strerror}", where, remedy)


def read_text(path: str | Path, what: str, *, errors: str = "strict") -> str:
    """Read the text in the file ``path``, see `decode_text`. Raises the errors of `read_bytes`."""
    content = read_bytes(path, what)
    with name_faults(escape(path), what):
        return decode_text(content, errors)


def read_names(path: str | Path, *, errors: str = "strict") -> list[str]:
    """Read class names from the file ``path``, one per line, stripped of white space.

    Raises the errors of `read_text`, and Unreadable for a blank line between names, because it would name a class.
    """
    text = read_text(path, "the class names", errors=errors)
    names = [line.strip() for line in io.StringIO(text.rstrip(), newline=None)]
    with name_faults(escape(path), "the class names"):
        if "" in names:
            raise ValueError(f"line {names.index('') + 1} is blank")
    return names


@contextmanager
def name_faults(name: str, what: str) -> Iterator[None]:
    """Re-raises any exception as Unreadable: ``what`` in the file ``name`` cannot be read.

    Unreachable passes unchanged, because it names its file.
    """
    try:
        yield
    except (MemoryError, Unreadable, Unreachable):
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, RuntimeError, struct.error and more
        raise Unreadable(f"{what} cannot be read: {_reason(error)}", name) from error


def read_many(read: Callable[[S], T], files: Sequence[S], workers: int) -> Iterator[T]:
    """Yield ``read(file)`` for each file in order, computed by ``workers`` threads (at least one).

    Threads suffice, because reading and decoding release the GIL.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, len(files), CHUNK):
            yield from pool.map(read, files[start : start + CHUNK])


def load_rgb(image: ImageFile.ImageFile) -> Image.Image:
    """Decode the pixels of ``image`` and return it as 8-bit RGB."""
    image.load()
    return to_rgb(image)


def check_size(width: int, height: int) -> None:
    """Raise ValueError unless an image may have this many pixels."""
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} px, not between 1 and {MAX_PIXELS:,}")


def _open_image(encoded: bytes) -> ImageFile.ImageFile:
    """Open the encoded image without decoding its pixels."""
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is empty, damaged, or in none of the formats {', '.join(FORMATS)}") from None
    check_size(*image.size)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert ``image`` to 8-bit RGB, dropping transparency; return it itself if it already is 8-bit RGB.

    Reduces 16-bit gray values to their upper 8 bits; PIL would clip them to white. Raises ValueError for floating-point
    and wider values, because they do not define white.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = _gray_8_bit(image)
    elif "transparency" in image.info:
        image = image.convert("RGBA")  # gives the same colors as direct conversion, without PIL's warning
    return image if image.mode == "RGB" else image.convert("RGB")


def _gray_8_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > MAX_16_BIT:
        raise ValueError(f"mode {image.mode} beyond 16 bits does not define white")
    return Image.fromarray((values >> 8).astype(np.uint8))


def _reason(error: Exception) -> str:
    """Return the text of an error as one line, without the file name that an OSError repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return escape(" ".join(str(error).split())) or type(error).__name__
