"""Index files, which have the position of each image in a folder of shards.

The index of the folder DATA/train is the file DATA/train.index. It is memory-mapped, so all processes of a machine
share one copy.

Tested by tests/data/test_shards.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np

from zoo.errors import DataError, truncate
from zoo.files import open_regular, replacing

DIGEST_BYTES = 32
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
        except (
            *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
            *(SyntaxError, TokenError, UserWarning),  # of the header of an array
        ) as error:
            raise self.unusable(str(error)) from error

    def unusable(self, reason: str) -> DataError:
        """Return the error to raise for an invalid index."""
        return DataError(f"the index cannot be used: {truncate(reason)}", self.path, REINDEX_HINT)

    def check_images(self, columns: Mapping[str, str]) -> None:
        """Raise DataError unless the index has classes, valid targets, and ``columns`` of equal length.

        The digest detects damage, not malice, because anyone can write an index. ``columns``: the kind of the dtype of
        each one-dimensional array.
        """
        classes = self.header.get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise self.unusable("it has no names of classes")
        arrays = {name: self.arrays.get(name) for name in columns}
        for name, array in arrays.items():
            if array is None or array.dtype.kind != columns[name]:
                raise self.unusable(f"it has no valid {name}")
        if len({len(array) for array in arrays.values() if array is not None}) != 1:
            raise self.unusable(f"{', '.join(columns)} differ in length")
        self.check_range("targets", 0, len(classes))

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
    """Write an index with a JSON ``header`` and one-dimensional arrays; DataError if it cannot be written.

    The file is the sha256 of the rest, a line of JSON with the header and the names of the arrays, and the arrays in
    numpy's .npy format.
    """
    content = io.BytesIO()
    content.write(json.dumps({"arrays": list(arrays), "header": header}).encode() + b"\n")
    for array in arrays.values():
        np.save(content, array, allow_pickle=False)
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.writelines([hashlib.sha256(content.getbuffer()).digest(), content.getbuffer()])
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
        mapped = np.memmap(file, mode="r")
        file.seek(0)
        expected = file.read(DIGEST_BYTES)
        if check and hashlib.sha256(mapped[DIGEST_BYTES:].data).digest() != expected:
            raise ValueError("it is damaged, or is not an index: its sha256 differs")
        content = json.loads(file.readline(MAX_HEADER_BYTES))
        header = content["header"]
        if not isinstance(header, dict):
            raise ValueError("it has no header")
        return header, {name: _map_array(file, mapped) for name in content["arrays"]}


def _map_array(file: IO[bytes], mapped: np.memmap) -> np.ndarray:
    """Return the array in .npy format at the position of ``file``, which moves behind it, from the ``mapped`` file."""
    np.lib.format.read_magic(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns of a header of Python 2
        (length,), _, dtype = np.lib.format.read_array_header_1_0(file)
    start = file.tell()
    array = np.frombuffer(mapped[start : start + length * dtype.itemsize].data, dtype)
    if len(array) != length:
        raise ValueError("it is truncated")
    file.seek(array.nbytes, os.SEEK_CUR)
    return array
