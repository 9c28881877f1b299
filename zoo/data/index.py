"""Index files, which list the images of a folder to save the scan.

The index of the folder DATA/train is the file DATA/train.index. It is memory-mapped, so all processes of a machine
share one copy.

Tested by tests/data/test_shards.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import DataError, truncate
from zoo.files import open_regular, replacing

MAGIC = b"zoo index 1\n"
DIGEST_BYTES = 32
START = len(MAGIC) + DIGEST_BYTES
LENGTH_BYTES = 8  # size of the field with the length of the header
ALIGNMENT = 64
DTYPE = re.compile(r"[<>|][iu][1248]|\|S[1-9]\d{0,6}", re.ASCII)  # numpy's integers and bytes
MAX_HEADER_BYTES = 2**25  # a million shards take less
REINDEX_HINT = "create it again with zoo data index"


class Index:
    """The header and the arrays of an index file.

    Pickling sends only the path, and the other process maps the file again. Raises DataError for a file that is damaged
    or cannot be read.

    Args:
    - `path`: the file.
    - `check`: whether to verify the digest; one of several processes does.
    """

    def __init__(self, path: Path, check: bool = True) -> None:
        self.path = path
        try:
            self.header, self.arrays = _read(path, check)
        except OSError as error:
            raise self.unusable(error.strerror or str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.unusable(str(error)) from error

    def unusable(self, reason: str) -> DataError:
        """Return the error to raise for an invalid index."""
        return DataError(f"the index cannot be used: {truncate(reason)}", self.path, REINDEX_HINT)

    def check_images(self, kind: str, columns: Mapping[str, str]) -> None:
        """Raise DataError unless the index has this ``kind``, classes, and valid ``columns`` and targets.

        The digest detects damage, not malice, because anyone can write an index. For ``columns`` see `check_columns`.
        """
        if self.header.get("kind") != kind:
            raise self.unusable(f"its kind is {self.header.get('kind')!r}, not {kind!r}")
        classes = self.header.get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise self.unusable("it has no names of classes")
        self.check_columns(columns)
        self.check_range("targets", 0, len(classes))

    def check_columns(self, columns: Mapping[str, str]) -> None:
        """Raise DataError unless each column is a one-dimensional array of its dtype's kind, all of the same length."""
        arrays = {name: self.arrays.get(name) for name in columns}
        for name, array in arrays.items():
            if array is None or array.ndim != 1 or array.dtype.kind != columns[name]:
                raise self.unusable(f"it has no valid {name}")
        if len({len(array) for array in arrays.values() if array is not None}) != 1:
            raise self.unusable(f"{', '.join(columns)} differ in length")

    def check_range(self, name: str, low: int, high: int | np.ndarray) -> None:
        """Raise DataError unless all values of an array are at least ``low`` and less than ``high``."""
        array = self.arrays[name]
        if not ((array >= low) & (array < high)).all():
            raise self.unusable(f"its {name} are out of range")

    def __reduce__(self) -> tuple[type[Index], tuple[Path, bool]]:
        return Index, (self.path, False)


def index_path(root: Path) -> Path:
    """Return the index file of the folder ``root``."""
    root = root if root.name else root.absolute()
    return root.with_name(f"{root.name}.index")


def write_index(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an index with a JSON ``header`` and arrays of integers or bytes; DataError if it cannot be written.

    The file is `MAGIC`, the sha256 of the rest, the length of the header, the header, and the arrays, each aligned to
    64 bytes.
    """
    about = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    text = json.dumps({"arrays": about, "header": header}).encode()
    pieces: list[Any] = [len(text).to_bytes(LENGTH_BYTES, "little"), text]
    end = START + LENGTH_BYTES + len(text)
    for array in arrays.values():
        pieces += [bytes(-end % ALIGNMENT), array.tobytes()]
        end += sum(map(len, pieces[-2:]))
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.writelines([MAGIC, digest.digest(), *pieces])
    except OSError as error:
        remedy = "make the folder writable, or run zoo data index where it is writable"
        raise DataError(f"the index cannot be written: {error.strerror}", path, remedy) from error


def facts_of(files: Sequence[Path]) -> dict[str, list[Any]]:
    """Return the entries of an index header that identify ``files``.

    - `shards`: the name and size of each.
    - `times`: their modification times in ns. An index without this key can be copied together with its files.
    """
    found = [os.stat(file) for file in files]
    return {
        "shards": [[file.name, status.st_size] for file, status in zip(files, found, strict=True)],
        "times": [status.st_mtime_ns for status in found],
    }


def _read(path: Path, check: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with os.fdopen(open_regular(path), "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it is not an index of this version")
        expected = file.read(DIGEST_BYTES)
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    if check and hashlib.sha256(mapped[START:].data).digest() != expected:
        raise ValueError("it is damaged: its sha256 differs")
    place = START + LENGTH_BYTES
    length = int.from_bytes(mapped[START:place].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length:,} bytes")
    content = json.loads(mapped[place : place + length].tobytes())
    place += length
    arrays = {}
    for name, (dtype_name, shape) in content["arrays"].items():
        if not DTYPE.fullmatch(dtype_name) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array has an invalid type or shape")
        dtype = np.dtype(dtype_name)
        place += -place % ALIGNMENT
        end = place + dtype.itemsize * math.prod(shape)
        if end > len(mapped):
            raise ValueError("it is truncated")
        arrays[name] = mapped[place:end].view(dtype).reshape(shape)
        place = end
    header = content["header"]
    if not isinstance(header, dict):
        raise ValueError("it has no header")
    return header, arrays
