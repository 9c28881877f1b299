"""Small data sets in the formats in which CIFAR and ImageNet are distributed, written byte for byte."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What cPickle of Python 2 writes before and after shape and bytes of an array of uint8.
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R(K\1"
DTYPE = b"cnumpy\ndtype\nU\2u1K\0K\1\x87R(K\3U\1|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89"


def python2_pickle(content: Mapping[bytes, Any]) -> bytes:
    """Return a dictionary of texts, numbers, lists and arrays of uint8 as Python 2 pickles it, protocol 2."""
    return b"\x80\2" + _pickled(content) + b"."


def _pickled(value: Any) -> bytes:
    if isinstance(value, Mapping):
        return b"}(" + b"".join(_pickled(key) + _pickled(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_pickled, value)) + b"e"
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    rows, columns = value.shape
    return ARRAY + _pickled(rows) + _pickled(columns) + b"\x86" + DTYPE + _pickled(value.tobytes()) + b"tb"


def cifar_batch(labels: Sequence[int], seed: int = 0, key: bytes = b"labels") -> dict[bytes, Any]:
    """Return what a file of images holds, of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return {b"batch_label": b"a batch", key: list(labels), b"data": pixels, b"filenames": [b"a.png"] * len(labels)}


def md5_of(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def write_tar(
    path: Path, files: Mapping[str, bytes], mode: str = "w:gz", links: Mapping[str, str] | None = None
) -> str:
    """Write an archive of ``files``, and of links by their names and targets; return its md5."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return md5_of(path.read_bytes())
