"""Index files: what images there are, kept so that nobody has to look for them again.

An index is one file beside what it is about: DATA/train.index for the folder DATA/train. It is mapped into memory, so
that all processes of a machine share one copy, however many images there are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import DataError, printable
from zoo.files import replacing

MAGIC = b"zoo index 1\n"
DIGEST_BYTES = 32
START = len(MAGIC) + DIGEST_BYTES
LENGTH_BYTES = 8  # of the number that says how long the header is
ALIGNMENT = 64
KINDS = "iuS"  # of numpy's dtypes: whole numbers and bytes
ADVICE = "make it anew with zoo data index"


class Index:
    """The header and the arrays of an index file.

    A copy of it in another process maps the file again, and is not sent what is in it.

    Args:
    - `path`: the file.
    - `check`: whether the digest is compared; a process that is given an index by another need not do so again.

    Raises DataError for a file that cannot be read, or that is damaged.
    """

    def __init__(self, path: Path, check: bool = True) -> None:
        self.path = path
        try:
            self.header, self.arrays = _read(path, check)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise DataError(f"the index cannot be used: {printable(reason)}; {printable(path)}: {ADVICE}") from error

    def __reduce__(self) -> tuple[type[Index], tuple[Path, bool]]:
        return Index, (self.path, False)


def index_path(root: Path) -> Path:
    """Return the file that the index of the folder ``root`` is in."""
    return root.with_name(f"{root.name}.index")


def write_index(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an index whose ``header`` is anything that JSON can hold; OSError if that is impossible.

    The arrays are of whole numbers or of bytes, with any shape. After the sha256 of all that follows come the length of
    the header, the header and the arrays, each at a multiple of 64 bytes.
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
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines([MAGIC, digest.digest(), *pieces])


def _read(path: Path, check: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it is no index, or one of another version")
        expected = file.read(DIGEST_BYTES)
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    if check and hashlib.sha256(mapped[START:].data).digest() != expected:
        raise ValueError("it is damaged, its sha256 is not the one that it should have")
    place = START + LENGTH_BYTES
    length = int.from_bytes(mapped[START:place].tobytes(), "little")
    content = json.loads(mapped[place : place + length].tobytes())
    place += length
    arrays = {}
    for name, (dtype_name, shape) in content["arrays"].items():
        dtype = np.dtype(str(dtype_name))
        if dtype.kind not in KINDS or dtype.itemsize == 0 or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array is of a kind that no index has")
        place += -place % ALIGNMENT
        end = place + dtype.itemsize * math.prod(shape)
        if end > len(mapped):
            raise ValueError("it is shorter than it should be")
        arrays[name] = mapped[place:end].view(dtype).reshape(shape)
        place = end
    header = content["header"]
    if not isinstance(header, dict):
        raise ValueError("it has no header")
    return header, arrays
