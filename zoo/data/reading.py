"""Reads image files as 8-bit RGB, in threads if there are many."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageFile

from zoo.errors import DataError, printable
from zoo.limits import MAX_FILE_BYTES, MAX_PIXELS

# The accepted formats, by PIL's names, and torchvision's extensions of image files. PIL knows more formats, and runs
# another program for one of them, EPS.
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

LONGEST_START = 16  # bytes at the beginning of a file by which PIL recognizes the formats

MAX_16_BIT = 65535

CHUNK = 1024  # files in the queue of the threads; a million of them would fill the memory

S = TypeVar("S")
T = TypeVar("T")


class Unreadable(DataError):
    """A file cannot be read or decoded; the message names it."""


def read_image(path: Path) -> Image.Image:
    """Return the image in ``path`` as 8-bit RGB; Unreadable when that is impossible.

    As for the published scores, the EXIF orientation is not applied, and truncated images are refused. So are images of
    more than 89,478,485 pixels, before memory is allocated, and everything but regular files.
    """
    return read_as(path, load_rgb, "an image")


def read_as(path: Path, convert: Callable[[ImageFile.ImageFile], T], what: str) -> T:
    """Return `decode_as` of the file ``path``."""
    return decode_as(read_bytes(path, what), printable(path), convert, what)


def decode_as(encoded: bytes, name: str, convert: Callable[[ImageFile.ImageFile], T], what: str) -> T:
    """Return ``convert`` of the image that the bytes ``encoded`` of a file hold; Unreadable if that is impossible.

    ``convert`` is given the image before its pixels are decoded. What it raises counts as a fault of the file, whose
    ``name`` the message has, and ``what`` the file should be.
    """
    with naming(name, what), _open_image(encoded) as image:
        return convert(image)


def read_bytes(path: str | Path, what: str = "an image") -> bytes:
    """Return the content of the file ``path``; Unreadable also where it is no regular file, or far too large."""
    with naming(printable(path), what):
        file = open_regular(path)  # one of Python's file objects would take twice as long
        try:
            size = os.fstat(file).st_size
            if size > MAX_FILE_BYTES:
                raise ValueError(f"it has {size:,} bytes, more than {MAX_FILE_BYTES:,}")
            content = os.read(file, size)
            while len(content) < size and (more := os.read(file, size - len(content))):
                content += more  # a network's file system may give less than was asked for
            return content
        finally:
            os.close(file)


def read_text(path: str | Path, what: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text in the file ``path``, of which all line ends become newlines; Unreadable as for `read_bytes`."""
    content = io.TextIOWrapper(io.BytesIO(read_bytes(path, what)), encoding, errors)
    with naming(printable(path), what):
        try:
            return content.read()
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8 text") from None


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor; ``flags`` are added to those of `os.open`.

    Raises OSError for anything else: opening a FIFO would wait for a writer, and reading a device might never end.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return file


class naming:
    """Context manager that re-raises any exception as Unreadable: ``what`` in the file ``name`` cannot be read.

    It is entered three times per image; a generator would take several times as long.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise Unreadable instead of ``error``, unless it is Unreadable, a MemoryError or an exit."""
        # Decoders raise OSError, SyntaxError, ValueError, RuntimeError, struct.error and more.
        if isinstance(error, Exception) and not isinstance(error, (MemoryError, Unreadable)):
            raise Unreadable(f"{self._what} cannot be read: {_reason(error)}; {self._name}") from error


def read_many(read: Callable[[S], T], files: Sequence[S], workers: int) -> Iterator[T]:
    """Yield ``read(file)`` of each file in order, read by ``workers`` threads, at least one.

    Threads suffice: reading and decoding release the GIL.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, len(files), CHUNK):
            yield from pool.map(read, files[start : start + CHUNK])


def load_rgb(image: ImageFile.ImageFile) -> Image.Image:
    """Return ``image``, whose pixels are not decoded yet, as 8-bit RGB, decoded."""
    image.load()
    return to_rgb(image)


def check_size(width: int, height: int) -> None:
    """Raise ValueError if an image may not have so many pixels."""
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} px, not between 1 and {MAX_PIXELS:,}")


def _open_image(encoded: bytes) -> ImageFile.ImageFile:
    """Return the image in ``encoded``, whose pixels are not decoded yet.

    PIL's own `Image.open` asks the formats in the same way, but prints a warning about images that are refused here.
    """
    image = Image.OPEN[_format_of(encoded)][0](io.BytesIO(encoded), "")
    check_size(*image.size)
    return image


def extension_of(encoded: bytes) -> str:
    """Return the extension that a file with this content should have; ValueError unless it is an image."""
    return FORMATS[_format_of(encoded)][0]


def _format_of(encoded: bytes) -> str:
    start = encoded[:LONGEST_START].ljust(LONGEST_START, b"\0")
    for name in FORMATS:
        accepts = Image.OPEN[name][1]
        if accepts is not None and accepts(start) is True:
            return name
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
