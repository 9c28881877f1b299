"""Index files with the position of each image in a folder of shards.

The index of the folder DATA/train is the file DATA/train.index, in numpy's .npz format; the index of a read-only folder
is in the cache.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo.config.limits import MAX_IMAGE_BYTES
from zoo.errors import DataError, truncate
from zoo.files import replace_file

COLUMNS = {
    "names": "S", "targets": "i", "shards": "i", "offsets": "i", "lengths": "i", "label_offsets": "i",
    "label_lengths": "i", "checksums": "i",
}  # fmt: skip
SHARD_SUFFIX = ".tar"
MAX_SHARD_BYTES = 2**40
REINDEX_HINT = "remove it, and it is written again"


class Index(NamedTuple):
    """Header and arrays (one entry per image) of an index, see `zoo.data.sources.shards.write_shard_index`."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def parse_index(content: bytes, where: object) -> Index:
    """Parse the index in ``content``. Raises DataError if it is damaged, or if names and numbers are impossible.

    Checksums detect damage, not malice: anyone can write an index.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
        header = json.loads(arrays.pop("header").item())
        _check(header, arrays)
    except Exception as error:  # a damaged file can raise nearly any error
        raise DataError(f"the index cannot be used: {truncate(error)}", where, REINDEX_HINT) from error
    return Index(header, arrays)


def _check(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless there are classes and shards, and each image is of a class and within its shard."""
    classes, shards = header["classes"], header["shards"]
    if not all(isinstance(name, str) for name in classes):
        raise ValueError("it has no names of classes")
    if not all(map(_is_shard, shards)):
        raise ValueError("its shards have invalid names or sizes")
    for name, kind in COLUMNS.items():
        if arrays[name].dtype.kind != kind or arrays[name].shape != (len(arrays["names"]),):
            raise ValueError(f"it has no valid {name}")
    _check_range(arrays, "targets", len(classes))
    _check_range(arrays, "shards", len(shards))
    sizes = np.array([size for _, size in shards], dtype=np.int64)[arrays["shards"]]
    for offsets, lengths in (("offsets", "lengths"), ("label_offsets", "label_lengths")):
        _check_range(arrays, lengths, MAX_IMAGE_BYTES + 1)
        _check_range(arrays, offsets, sizes - arrays[lengths] + 1)


def _check_range(arrays: Mapping[str, np.ndarray], name: str, end: int | np.ndarray) -> None:
    if not ((arrays[name] >= 0) & (arrays[name] < end)).all():
        raise ValueError(f"its {name} are out of range")


def _is_shard(fact: list[Any]) -> bool:
    """Return whether ``fact`` is a pair of a file name without folder, and a size."""
    name, size = fact
    return (
        os.path.basename(name) == name
        and name.endswith(SHARD_SUFFIX)
        and type(size) is int
        and 0 <= size <= MAX_SHARD_BYTES
    )


def index_path(root: Path) -> Path:
    """Return the index file of the folder ``root``."""
    root = root if root.name else root.absolute()
    return root.with_name(f"{root.name}.index")


def write_index(path: Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an index with a JSON ``header`` and one-dimensional arrays. Raises DataError if it cannot be written."""
    try:
        with replace_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, header=np.array(json.dumps(header).encode()), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        remedy = "free disk space, or make the folder writable"
        raise DataError(f"the index cannot be written: {error.strerror}", path, remedy) from error
