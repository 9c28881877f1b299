"""Digests that identify the items of a data set object without reading any item."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from zoo.data.sources.folder import sizes_digest

# Attributes of torchvision's data sets, most of which exist with and without an underscore in front.
ATTRIBUTES = ("targets", "labels", "samples", "imgs", "images", "image_files", "data")
MAX_HASHED_BYTES = 2**28  # hashed bytes of an array, in rows spread evenly over it


def object_digests(dataset: Any) -> dict[str, str]:
    """Return SHA-256 digests, by attribute, of the content that identifies the items of a data set.

    They cover the indices of a Subset; labels, file names and arrays in `ATTRIBUTES`, and the sizes of some files; and
    the data sets in a Subset, in a ConcatDataset and in attributes of other wrappers. They ignore the folder of the
    files, because it may differ between machines. Empty for a data set without such attributes.
    """
    digests: dict[str, Any] = {}
    for attribute, content in _contents(dataset, ()):
        digests.setdefault(attribute, hashlib.sha256()).update(hashlib.sha256(content).digest())
    return {attribute: digest.hexdigest() for attribute, digest in digests.items()}


def _contents(dataset: Any, outer: tuple[int, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield the attributes of a data set and of all data sets inside, as bytes; ``outer`` are ids of its wrappers."""
    if id(dataset) in outer:
        return
    inner: Sequence[Any] = [each for each in getattr(dataset, "__dict__", {}).values() if isinstance(each, Dataset)]
    if isinstance(dataset, Subset):
        yield from _content("indices", dataset.indices)
    elif isinstance(dataset, ConcatDataset):
        inner = dataset.datasets
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield from _content("tensors", tensor)
    else:
        seen: list[int] = []  # ids: torchvision's folders have one list under two names
        for name in ATTRIBUTES:
            for values in (getattr(dataset, name, None), getattr(dataset, f"_{name}", None)):
                if id(values) not in seen:
                    yield from _content(name, values)
                    seen.append(id(values))
    for each in inner:
        yield from _contents(each, (*outer, id(dataset)))


def _content(name: str, values: Any) -> Iterator[tuple[str, bytes]]:
    """Yield an array or a list of plain values as bytes, for file names also the sizes; nothing for other values."""
    if isinstance(values, Tensor) and values.layout is torch.strided:
        head = f"{values.dtype} {tuple(values.shape)} ".encode()
        rows = _spread_rows(values.detach(), values.element_size() * values.numel())
        yield name, head + rows.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(values, np.ndarray) and not values.dtype.hasobject:
        yield name, f"{values.dtype} {values.shape} ".encode() + _spread_rows(values, values.nbytes).tobytes()
    elif isinstance(values, (list, tuple, range, dict, np.ndarray)):
        entries = values if isinstance(values, dict) else list(values)
        paths = [] if isinstance(entries, dict) else _paths(entries)
        if paths:
            start = len(os.path.dirname(os.path.commonprefix(paths)))  # noqa: RUF071 - dirname ends it at a folder
            pairs = zip(paths, entries, strict=True)
            entries = [(path[start:], *(entry[1:] if isinstance(entry, tuple) else ())) for path, entry in pairs]
        yield name, json.dumps(entries, skipkeys=True, default=_described).encode()
        if paths and os.path.isfile(paths[0]):
            yield "sizes", sizes_digest(paths.__getitem__, len(paths)).encode()


def _spread_rows(array: Any, num_bytes: int) -> Any:
    """Return rows of an array that are spread evenly over it and have at most `MAX_HASHED_BYTES`."""
    return array[:: -(-num_bytes // MAX_HASHED_BYTES)] if num_bytes > MAX_HASHED_BYTES else array


def _paths(entries: list[Any]) -> list[str]:
    """Return the file names of a list of names, or of tuples that begin with a name; empty for other entries."""
    names = [entry[0] if isinstance(entry, tuple) and entry else entry for entry in entries]
    return [os.fspath(name) for name in names] if all(isinstance(name, (str, os.PathLike)) for name in names) else []


def _described(value: Any) -> Any:
    """Return a plain value that is the same in all processes: a number, a path, otherwise the type of ``value``."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0):
        return value.item()
    return type(value).__qualname__
