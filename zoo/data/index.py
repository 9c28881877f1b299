"""Index files: what images there are, kept so that nobody has to look for them again.

An index is one file beside what it is about: DATA/train.index for the folder DATA/train. It is mapped into memory, so
that all processes of a machine share one copy, however many images there are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from zoo.data.reading import open_regular
from zoo.errors import DataError, brief, listed, printable
from zoo.files import replacing

logger = logging.getLogger(__name__)

MAGIC = b"zoo index 1\n"
DIGEST_BYTES = 32
START = len(MAGIC) + DIGEST_BYTES
LENGTH_BYTES = 8  # of the number that says how long the header is
ALIGNMENT = 64
DTYPE = re.compile(r"[<>|][iu][1248]|\|S[1-9]\d{0,6}", re.ASCII)  # of numpy: whole numbers and bytes
MAX_HEADER_BYTES = 2**25  # a million shards take less
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
        except OSError as error:
            raise self.unusable(error.strerror or str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.unusable(str(error)) from error

    def unusable(self, reason: str) -> DataError:
        """Return the error to raise for an index that is not what it should be."""
        return DataError(f"the index cannot be used: {brief(reason)}; {printable(self.path)}: {ADVICE}")

    def check_images(self, kind: str, columns: Mapping[str, str]) -> None:
        """Raise DataError unless this is an index of the ``kind``, with classes and the ``columns`` of each image.

        The digest says nothing about who made an index. For ``columns`` see `check_columns`; "targets" are numbers of
        classes.
        """
        if self.header.get("kind") != kind:
            raise self.unusable(f"its kind is {self.header.get('kind')!r}, not {kind!r}")
        classes = self.header.get("classes")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise self.unusable("it has no names of classes")
        self.check_columns(columns)
        self.check_range("targets", 0, len(classes))

    def check_columns(self, columns: Mapping[str, str]) -> None:
        """Raise DataError unless there is an array of each name, of one length and of the kind of numpy's dtypes."""
        arrays = {name: self.arrays.get(name) for name in columns}
        for name, array in arrays.items():
            if array is None or array.ndim != 1 or array.dtype.kind != columns[name]:
                raise self.unusable(f"it has no {name}, or they are of another kind")
        if len({len(array) for array in arrays.values() if array is not None}) != 1:
            raise self.unusable(f"{', '.join(columns)} are not equally many")

    def check_range(self, name: str, low: int, high: int | np.ndarray) -> None:
        """Raise DataError unless all values of an array are at least ``low`` and less than ``high``."""
        array = self.arrays[name]
        if not ((array >= low) & (array < high)).all():
            raise self.unusable(f"its {name} are not from {low} to what there is")

    def __reduce__(self) -> tuple[type[Index], tuple[Path, bool]]:
        return Index, (self.path, False)


def index_path(root: Path) -> Path:
    """Return the file that the index of the folder ``root`` is in."""
    root = root if root.name else root.absolute()
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


def read_index(
    root: Path,
    kind: str,
    columns: Mapping[str, str],
    files: Sequence[Path],
    write: Callable[[Path], object],
) -> Index:
    """Return the index of the folder ``root``; if there is none, one process of several makes it with ``write(root)``.

    Its header should have the ``kind``, and the `facts_of` the ``files``; for ``columns`` see `Index.check_images`.
    Raises DataError if they are others, and for an index that cannot be read or written.
    """
    path = index_path(root)
    if not path.exists():
        try:
            with FileLock(path.with_name(f".{path.name}.lock")):
                if not path.exists():  # another process may have written it meanwhile
                    logger.info("making the index of the %s; %s", kind, printable(root))
                    write(root)
        except OSError as error:
            raise DataError(
                f"{kind} need an index, and it cannot be written: {error.strerror}; {printable(path)}: make it with "
                "zoo data index where the folder can be written to"
            ) from error
    index = Index(path)
    index.check_images(kind, columns)
    facts = facts_of(files)
    if index.header.get("shards") != facts["shards"]:
        raise DataError(f"the index is not that of the {kind} that are there; {printable(path)}: {ADVICE}")
    times = index.header.get("times", facts["times"])
    if times != facts["times"]:
        known = times if isinstance(times, list) else []
        changed = [file.name for file, now, then in zip(files, facts["times"], known, strict=False) if now != then]
        raise DataError(
            f"the index may be out of date, as these {kind} were changed or copied after it was made: "
            f"{listed(changed)}; {printable(path)}: {ADVICE}"
        )
    return index


def facts_of(files: Sequence[Path]) -> dict[str, list[Any]]:
    """Return what an index remembers of ``files``, to notice that one is replaced.

    - `shards`: the name and size of each.
    - `times`: when each was last changed, in nanoseconds; an index without this key may be copied with its files.
    """
    found = [os.stat(file) for file in files]
    return {
        "shards": [[file.name, status.st_size] for file, status in zip(files, found, strict=True)],
        "times": [status.st_mtime_ns for status in found],
    }


def _read(path: Path, check: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with os.fdopen(open_regular(path), "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it is no index, or one of another version")
        expected = file.read(DIGEST_BYTES)
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    if check and hashlib.sha256(mapped[START:].data).digest() != expected:
        raise ValueError("it is damaged, its sha256 is not the one that it should have")
    place = START + LENGTH_BYTES
    length = int.from_bytes(mapped[START:place].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length:,} bytes, more than any needs")
    content = json.loads(mapped[place : place + length].tobytes())
    place += length
    arrays = {}
    for name, (dtype_name, shape) in content["arrays"].items():
        if not DTYPE.fullmatch(dtype_name) or not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("an array is of a kind that no index has")
        dtype = np.dtype(dtype_name)
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
