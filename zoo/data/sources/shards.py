"""Images in shards: tar files in the format of the webdataset package, with random access to each image.

The members of a sample share a key, their name up to the first dot: KEY.jpg (or another image format), and KEY.cls with
the number of the class, or KEY.json with the number under "label". Shards are never unpacked.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo.config.limits import MAX_CLASSES, MAX_IMAGE_BYTES
from zoo.data.reading import (
    EXTENSIONS,
    delivered,
    is_of_file_system,
    name_faults,
    read_bytes,
    read_names,
    unreachable,
)
from zoo.data.seeding import windowed_permutation
from zoo.data.sources.index import REINDEX_HINT, SHARD_SUFFIX, Index, index_path, parse_index, write_index
from zoo.data.sources.location import DataPath
from zoo.data.sources.scan import check_filled, log_skipped
from zoo.errors import DataError, ZooError, escape, join_names
from zoo.files import cache_dir, file_lock, open_regular

logger = logging.getLogger(__name__)

CLASSES_FILE = "classes.txt"  # the names of the classes, one per line
INDEX_FOLDER = "shard-index"  # cache folder for the indices of shards on read-only file systems
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
SYSTEM_FOLDER = "__MACOSX"  # macOS writes copies of hidden files into archives
PIECE_BYTES = 2**20
REPLACE = "replace it, or create it anew"


class _Member(NamedTuple):
    """Position of a member in a tar file."""

    offset: int
    size: int

    def read(self, file: IO[bytes] | io.FileIO) -> bytes:
        """Return the content of the member of the open tar ``file``."""
        file.seek(self.offset)
        return file.read(self.size)


class _IndexEntry(NamedTuple):
    """A sample of a shard: its key, the positions of image and label, its class, and the `_checksum` of both."""

    key: str
    image: _Member
    label: _Member
    target: int
    checksum: int


class Shards:
    """The images of the tar files in ``root``, in the order of the files and of the images in them; see
    `zoo.data.sources.folder.FolderSource`.

    Writes an index on first use, beside ``root`` or, if that folder is read-only, in the cache. Raises DataError if
    shards are damaged, if the index does not fit them, or if it cannot be written.

    Args:
    - `root`: the folder.
    - `allow_empty_classes`: whether classes may have no image.
    """

    root: DataPath
    remedy = "replace the shard; if it was changed on purpose, remove its index, which is written again"

    def __init__(self, root: Path, allow_empty_classes: bool = False) -> None:
        self._begin(root, root, _open_index(root), allow_empty_classes)

    def _begin(self, root: DataPath, folder: Path, index: Index, allow_empty_classes: bool) -> None:
        """Set the state. ``folder`` has the files of ``root``; messages name ``root``."""
        self.root, self._folder, self._index = root, folder, index
        arrays = index.arrays
        self.names, self.targets = arrays["names"], arrays["targets"]
        self._shards = arrays["shards"]
        self.details = self.targets, arrays["lengths"], arrays["checksums"]  # identify the images, with the names
        self.classes = [str(name) for name in self._index.header["classes"]]
        check_filled(root, self.classes, np.unique(self.targets).tolist(), allow_empty_classes)

    def read(self, index: int) -> bytes:
        """Return the bytes of image ``index``.

        Raises Unreadable if this fails or if the checksum of the image and its label differs. Raises Unreachable like
        `zoo.data.reading.delivered`.
        """
        arrays = self._index.arrays
        image = _Member(int(arrays["offsets"][index]), int(arrays["lengths"][index]))
        label = _Member(int(arrays["label_offsets"][index]), int(arrays["label_lengths"][index]))
        with name_faults(escape(os.path.join(self.root, os.fsdecode(self.names[index]))), "an image"):
            path = os.path.join(self._folder, self._index.header["shards"][self._shards[index]][0])

            def read() -> tuple[bytes, bytes]:
                with open_regular(path) as file:
                    return image.read(file), label.read(file)

            encoded, text = delivered(read, path)
            if _checksum(encoded, text) != arrays["checksums"][index]:
                raise ValueError("the shard is damaged, or has changed since it was indexed")
            return encoded

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, (n,) int64, that needs only ``window`` shards at a time, or all."""
        if window is None:
            return torch.randperm(len(self.names), generator=generator)
        shards = torch.from_numpy(np.array(self._shards, dtype=np.int64))
        return windowed_permutation(shards, int(shards.max()) + 1, window, generator)


def write_shard_index(root: Path, path: Path) -> int:
    """Write the index of the tar files in ``root`` to ``path``; return the number of images. Raises DataError."""
    shards = shard_files(root)
    entries = [list(_scan_shard(shard)) for shard in shards]
    flat = [entry for share in entries for entry in share]
    classes = _class_names(root, max((entry.target for entry in flat), default=-1) + 1)
    names = [
        os.fsencode(f"{shard.name}/{entry.key}")
        for shard, share in zip(shards, entries, strict=True)
        for entry in share
    ]
    arrays = {
        "names": np.array(names, dtype=bytes),
        "targets": np.array([entry.target for entry in flat], dtype=np.int32),
        "shards": np.repeat(np.arange(len(shards), dtype=np.int32), [len(share) for share in entries]),
        "offsets": np.array([entry.image.offset for entry in flat], dtype=np.int64),
        "lengths": np.array([entry.image.size for entry in flat], dtype=np.int32),
        "label_offsets": np.array([entry.label.offset for entry in flat], dtype=np.int64),
        "label_lengths": np.array([entry.label.size for entry in flat], dtype=np.int32),
        "checksums": np.array([entry.checksum for entry in flat], dtype=np.int64),
    }
    write_index(path, {"classes": classes, "shards": _names_and_sizes(shards)}, arrays)
    return len(flat)


def _names_and_sizes(shards: Sequence[Path]) -> list[list[Any]]:
    return [[shard.name, delivered(shard.stat, shard).st_size] for shard in shards]


def _open_index(root: Path) -> Index:
    """Open the index of the shards in ``root``. If it does not exist, one of several processes writes it.

    Raises DataError if the index cannot be written or does not fit the shards.
    """
    path = _indexed(root)
    index = parse_index(read_bytes(path, "an index"), path)
    if index.header["shards"] != _names_and_sizes(shard_files(root)):
        raise DataError("the index belongs to other shards", path, REINDEX_HINT)
    names, has_file = index.header["classes"], (root / CLASSES_FILE).exists()
    if _class_names(root, 0 if has_file else len(names)) != names:
        what = f"{CLASSES_FILE} and the index have different names" if has_file else f"{CLASSES_FILE} was removed"
        raise DataError(f"{what}: the index names the classes {join_names(names, 3)}", path, REINDEX_HINT)
    return index


def _indexed(root: Path) -> Path:
    """Return the index file of the shards in ``root``; write it if it does not exist.

    It is beside ``root``, or in the cache if the folder of ``root`` is read-only.
    """
    path = index_path(root)
    try:
        try:
            _write_missing(root, path)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            path = cache_dir() / INDEX_FOLDER / f"{_shards_digest(root)}.index"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_missing(root, path)
    except OSError as error:
        remedy = "make the folder writable, or set ZOO_CACHE to a writable folder"
        raise DataError(f"the index cannot be written: {error.strerror}", path, remedy) from error
    return path


def _write_missing(root: Path, path: Path) -> None:
    """Write the index ``path`` of the shards in ``root``, unless it exists or another process writes it first."""
    if path.exists():
        return
    with file_lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            logger.info("writing the index of the shards; %s", escape(path))
            write_shard_index(root, path)


def _shards_digest(root: Path) -> str:
    """Return the sha256 of the path of ``root`` and of names, sizes and modification times of its files."""
    digest = hashlib.sha256(os.fsencode(root.absolute()))
    for file in (*shard_files(root), root / CLASSES_FILE):
        status = file.stat() if file.exists() else None
        digest.update(
            os.fsencode(file.name) + (b"\0%d %d\n" % (status.st_size, status.st_mtime_ns) if status else b"\0")
        )
    return digest.hexdigest()


def _class_names(root: Path, num_classes: int) -> list[str]:
    path = root / CLASSES_FILE
    if not path.exists():
        return [str(number) for number in range(num_classes)]
    names = read_names(path, errors="surrogateescape")  # the names of folders
    if len(names) < num_classes:
        what = f"an image is of class {num_classes - 1}, but there are only {len(names)} names of classes"
        raise DataError(what, path, "add the missing names, one per line")
    return names


def shard_files(root: Path) -> list[Path]:
    """Return the tar files in the folder ``root``, sorted by name."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.name.endswith(SHARD_SUFFIX) and entry.is_file()]
    except OSError:  # reported by the search for images in the folder
        return []
    return [root / name for name in sorted(names) if not name.startswith(".")]


def _scan_shard(path: Path) -> Iterator[_IndexEntry]:
    """Yield the positions of the images in a tar file. Raises DataError if it is damaged or a sample has no class."""
    skipped: list[str] = []
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            yield from _scan_tar(tar, file, num_bytes, skipped)
    except ZooError as error:
        raise DataError(error, path, REPLACE) from error
    except OSError as error:
        if is_of_file_system(error):
            raise unreachable(error, path) from error
        raise DataError(f"the shard cannot be read: {error.strerror or error}", path, REPLACE) from error
    except (
        *(tarfile.TarError, ValueError, OverflowError, EOFError),
        *(RecursionError, MemoryError),  # from headers that refer to each other, or claim a huge size
    ) as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"the shard cannot be read: {reason}", path, REPLACE) from error
    log_skipped(path, skipped)


def _scan_tar(tar: Any, file: IO[bytes], num_bytes: int, skipped: list[str]) -> Iterator[_IndexEntry]:
    """Yield the positions of the images in an open tar file of ``num_bytes``; append hidden members to ``skipped``.

    Drops members after each sample, because each can hold as much memory as the longest header before it.
    """
    sample: dict[str, _Member] = {}
    key = ""
    while (member := tar.next()) is not None:
        tar.members.clear()
        if member.isdir():
            continue
        folder, name = os.path.split(member.name)
        if name.startswith(".") or SYSTEM_FOLDER in folder.split("/"):
            skipped.append(member.name)
            continue
        if not member.isreg() or member.issparse():
            raise DataError(f"{member.name} is a link or a device")
        if not 0 <= member.size <= num_bytes - member.offset_data:
            raise DataError(f"{member.name} is truncated")
        start, _, extension = name.partition(".")
        if os.path.join(folder, start) != key:
            yield from _scan_sample(file, key, sample)
            key, sample = os.path.join(folder, start), {}
        if extension.lower() in sample:
            raise DataError(f"{member.name} occurs twice")
        sample[extension.lower()] = _Member(member.offset_data, member.size)
    yield from _scan_sample(file, key, sample)
    _check_end(file, tar.offset, num_bytes)


def _check_end(file: IO[bytes], offset: int, num_bytes: int) -> None:
    """Raise DataError unless the end that tarfile found is followed by blocks of zeros only, at least one.

    tarfile also stops at a truncated or damaged header, and the images after it would be lost.
    """
    file.seek(offset)
    is_zero = num_bytes - offset >= tarfile.BLOCKSIZE
    while is_zero and (piece := file.read(PIECE_BYTES)):
        is_zero = not any(piece)
    if not is_zero:
        raise DataError(f"the shard is truncated or damaged after byte {offset:,}")


def _scan_sample(file: IO[bytes], key: str, sample: dict[str, _Member]) -> Iterator[_IndexEntry]:
    """Yield the position of the image of a sample; nothing before the first sample."""
    if not sample:
        return
    images = [member for extension, member in sample.items() if f".{extension}" in EXTENSIONS]
    if len(images) != 1:
        members = join_names(f"{key}.{extension}" for extension in sample)
        what = f"sample {key} has {len(images)} images, not one: its members are {members}"
        raise DataError(f"{what}, as the key of a sample ends at the first dot of a name")
    label = sample.get("cls") or sample.get("json")
    if label is None:
        what = f"sample {key} has no class: neither {key}.cls nor .json"
        raise DataError(f"{what}; if this is an archive of one class, unpack it into a folder of the class")
    for part, member in (("image", images[0]), ("label", label)):
        if member.size > MAX_IMAGE_BYTES:
            raise DataError(f"the {part} of sample {key} has {member.size:,} bytes, more than {MAX_IMAGE_BYTES:,}")
    text = label.read(file)
    target = _target_of(text, label is sample.get("cls"), key)
    yield _IndexEntry(key, images[0], label, target, _checksum(images[0].read(file), text))


def _checksum(image: bytes, label: bytes) -> int:
    """Return the CRC-32 of the bytes of a label and of its image."""
    return zlib.crc32(image, zlib.crc32(label))


def _target_of(content: bytes, is_number: bool, key: str) -> int:
    try:
        target = int(content.decode("ascii")) if is_number else json.loads(content)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        target = None
    if type(target) is not int or not 0 <= target < MAX_CLASSES:
        raise DataError(
            f"sample {key} has no class: {'its .cls' if is_number else 'label in its .json'} is not a whole "
            f"number from 0 to {MAX_CLASSES - 1:,}"
        )
    return target
