"""A reader of MATLAB's files (version 5, little-endian): arrays of structs with texts and numbers, no more."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zoo.errors import DataError, printable

HEADER_BYTES = 128
MAX_BYTES = 1 << 28  # of one variable, unpacked

# Types of elements.
NUMBERS = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
MATRIX, COMPRESSED = 14, 15
TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le", 18: "utf-32-le"}
# Classes of matrices.
STRUCT, CHARACTERS, FIRST_NUMERIC, LAST_NUMERIC = 2, 4, 6, 15


class _Element(NamedTuple):
    kind: int
    content: bytes


def read_structs(content: bytes, name: str) -> list[dict[str, Any]]:
    """Return the structs of the array ``name`` in a MATLAB file, in their order.

    A text is a str and a number an int or a float; any other field is None. Raises DataError for a file that is damaged
    or in another format, and if it has no such array.
    """
    try:
        if content[124:128] != b"\0\1IM":
            raise ValueError("it is no little-endian MATLAB file of version 5")
        for element in _elements(content[HEADER_BYTES:]):
            found, value = _matrix(_unpacked(element))
            if found == name and isinstance(value, list):
                return value
        raise ValueError(f"it has no array of structs {name!r}")
    except Exception as error:  # a damaged file may raise nearly any, StopIteration and RecursionError among them
        raise DataError(f"a MATLAB file cannot be read: {printable(error) or type(error).__name__}") from error


def _unpacked(element: _Element) -> bytes:
    """Return the content of a matrix that may be compressed."""
    if element.kind != COMPRESSED:
        return element.content
    unpacked = zlib.decompressobj().decompress(element.content, MAX_BYTES)
    return next(_elements(unpacked)).content


def _elements(content: bytes) -> Iterator[_Element]:
    """Yield the elements that a file or a matrix consists of, one after another."""
    start = 0
    while start < len(content):
        kind, size = struct.unpack_from("<II", content, start)
        if kind >> 16:  # a small element: its size is beside its kind, and its content in place of the size
            kind, size, begin, end = kind & 0xFFFF, kind >> 16, start + 4, start + 8
        else:
            begin = start + 8
            end = begin + size + (0 if kind == COMPRESSED else -size % 8)
        if begin + size > len(content):
            raise ValueError("it is cut off")
        yield _Element(kind, content[begin : begin + size])
        start = end


def _matrix(content: bytes) -> tuple[str, Any]:
    """Return the name of a matrix, empty for a field, and its value as `read_structs` has it."""
    if not content:
        return "", None
    parts = _elements(content)
    flags, shape, name = (next(parts) for _ in range(3))
    kind = flags.content[0]
    value: Any = None
    if kind == STRUCT:
        value = _structs(parts, int(np.prod(_numbers(shape))))
    elif kind == CHARACTERS:
        text = next(parts)
        value = text.content.decode(TEXTS[text.kind])
    elif FIRST_NUMERIC <= kind <= LAST_NUMERIC and (numbers := _numbers(next(parts))).size == 1:
        value = numbers.item()
    return name.content.decode("latin-1"), value


def _structs(parts: Iterator[_Element], count: int) -> list[dict[str, Any]]:
    """Return ``count`` structs: the length of a field's name, the names, and the fields of one struct after another."""
    (length,) = _numbers(next(parts))
    names = next(parts).content
    fields = [names[start : start + length].split(b"\0")[0].decode("latin-1") for start in range(0, len(names), length)]
    if not fields:
        raise ValueError("its structs have no fields")  # any number of which would fit into the file
    return [{field: _matrix(next(parts).content)[1] for field in fields} for _ in range(count)]


def _numbers(element: _Element) -> np.ndarray:
    return np.frombuffer(element.content, NUMBERS[element.kind])
