"""Images in shards: tar files as the webdataset package reads and writes them, of which any image is read by position.

A sample is a few members with the same name up to the first dot of their last part, the key: KEY.jpg (or another image)
and KEY.cls, the number of its class, or KEY.json, which has it under "label". Nothing is ever unpacked.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from zoo.data.archives import check_free, complete_folder
from zoo.data.index import ADVICE, Index, facts_of, index_path, read_index, write_index
from zoo.data.places import Place
from zoo.data.reading import EXTENSIONS, extension_of, naming, open_regular, read_text
from zoo.data.scan import check_filled
from zoo.data.source import Source
from zoo.errors import DataError, ZooError, printable
from zoo.limits import MAX_CLASSES, MAX_FILE_BYTES, is_whole

SHARDS = "shards"  # the kind of their index
COLUMNS = {"names": "S", "targets": "i", "shards": "i", "offsets": "i", "lengths": "i", "checksums": "i"}
SUFFIX = ".tar"
CLASSES = "classes.txt"  # the names of the classes, one per line
NAMES = "the class names"  # what that file holds, in messages
MAX_LABEL_BYTES = 1 << 20  # of a .cls or .json member
MAX_HEADER_BYTES = 1 << 16  # of a tar member, which a long name makes longer
MAX_SHARD_BYTES = 2**40
PIECE_BYTES = 2**20
MAX_OPEN = 64  # shards of a process whose files stay open
UNKNOWN = -1  # checksum of an image of somebody else's shards
COVERS_LABELS = "label_checksums"  # in the header of an index: the checksums are those of images and labels
PER_SHARD = 1000


class Bar(Protocol):
    """What shows how many images are done."""

    def advance(self, count: int, /) -> object:
        """Count ``count`` more images."""


ShowProgress = Callable[[str, int], AbstractContextManager[Bar]]


class _Place(NamedTuple):
    """Where the bytes of an image are."""

    key: str
    offset: int
    length: int
    target: int
    checksum: int = UNKNOWN


class _Member(NamedTuple):
    """Where the bytes of a member of a tar file are."""

    offset: int
    size: int


class Shards:
    """The images of the tar files in ``root``, in the order of these files and of the images in them.

    The index is read from the file beside ``root``, or made on first use and written there by one
    process of several. Raises DataError for shards that are damaged, for an index that does not fit them, and where
    there is none and it cannot be written.

    Args:
    - `root`: the folder.
    - `allow_empty_classes`: whether classes may have no image.
    """

    root: Place

    def __init__(self, root: Path, allow_empty_classes: bool = False) -> None:
        self._begin(root, _index_of(root), allow_empty_classes)

    def _begin(self, root: Place, index: Index, allow_empty_classes: bool) -> None:
        self.root, self._index = root, index
        self._set_state()
        self.classes = [str(name) for name in self._index.header["classes"]]
        check_filled(root, self.classes, np.unique(self.targets).tolist(), allow_empty_classes)

    def _set_state(self) -> None:
        self._opened: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()  # no thread may close the file that another one reads
        arrays = self._index.arrays
        self.names, self.targets = arrays["names"], arrays["targets"]
        self._shards, self._offsets, self._lengths = arrays["shards"], arrays["offsets"], arrays["lengths"]
        self._checksums = arrays["checksums"]
        self._covers_labels = self._index.header.get(COVERS_LABELS) is True

    def read(self, index: int) -> bytes:
        """Return the bytes of image ``index``; Unreadable also if they are not those that the index was made of."""
        with self._naming(index), self._lock:
            return self._read_from(self._file(int(self._shards[index])), index)

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """What distinguishes the images besides their names, which are numbers."""
        return self.targets, self._lengths, self._checksums

    def _naming(self, index: int) -> naming:
        return naming(printable(os.path.join(self.root, os.fsdecode(self.names[index]))), "an image")

    def _read_from(self, file: int, index: int) -> bytes:
        """Return the bytes of image ``index`` from the open file of its shard; ValueError if the checksum differs.

        The label lies behind the image: `_write_shard` puts it into the next member.
        """
        length, checksum = int(self._lengths[index]), int(self._checksums[index])
        label = str(self.targets[index]).encode() if self._covers_labels else b""
        end = _padded(length) + tarfile.BLOCKSIZE + len(label) if label else length
        content = os.pread(file, end, int(self._offsets[index]))
        encoded = content[:length]
        if len(content) != end or checksum not in (UNKNOWN, _checksum(encoded, content[end - len(label) :])):
            raise ValueError("the shard is damaged, or was changed after its index was made")
        return encoded

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, (n,) int64.

        With a ``window`` the shards are in a random order, and images change their places only among those of so many
        shards in a row, which is all that has to be at hand at a time. Without one all images are shuffled together.
        """
        if window is None:
            return torch.randperm(len(self.names), generator=generator)
        shards = torch.from_numpy(np.array(self._shards, dtype=np.int64))
        windows = torch.randperm(int(shards.max()) + 1, generator=generator)[shards] // window
        shuffled = torch.randperm(len(shards), generator=generator)
        return shuffled[windows[shuffled].argsort(stable=True)]

    def _file(self, shard: int) -> int:
        """Return the open file of a shard; the one that was used longest ago is closed when there are too many."""
        file = self._opened.pop(shard, None)
        if file is None:
            file = open_regular(os.path.join(self.root, self._index.header["shards"][shard][0]))
        self._opened[shard] = file
        if len(self._opened) > MAX_OPEN:
            os.close(self._opened.popitem(last=False)[1])
        return file

    def __del__(self) -> None:
        for file in self.__dict__.get("_opened", {}).values():
            os.close(file)

    def __getstate__(self) -> dict[str, object]:
        return {"root": self.root, "classes": self.classes, "_index": self._index}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        self._set_state()


def has_shards(root: Path) -> bool:
    """Return whether the folder ``root`` holds tar files."""
    return bool(_shard_files(root))


def write_shard_index(root: Path) -> int:
    """Write the index of the tar files in ``root``; return the number of images. DataError if that is impossible."""
    header, arrays = _indexed(root)
    try:
        write_index(index_path(root), header, arrays)
    except OSError as error:
        raise DataError(f"the index cannot be written: {error.strerror}; {printable(index_path(root))}") from error
    return len(arrays["names"])


def write_shards(source: Source, target: Path, *, per_shard: int, seed: int | None, show_progress: ShowProgress) -> int:
    """Write the images of ``source`` to ``target``/000000.tar and so on, with their index; return the number of shards.

    The bytes are those of the files. They depend on the images, the ``seed`` and ``per_shard`` alone. ``target`` is
    complete or not there at all. Raises DataError if there is something at ``target`` already, and for an image that
    cannot be read.

    Args:
    - `per_shard`: images in a shard; the last one may have fewer.
    - `seed`: of the order of the images, so that each shard has images of many classes; None keeps their order. Images
      of Parquet files change their places within a window of row groups, see `ParquetImages.order`.
    """
    check_free(target)
    num_images = len(source.names)
    order: Sequence[int] = range(num_images)
    if seed is not None:
        order = source.order(torch.Generator().manual_seed(seed), None).tolist()
    places: list[list[_Place]] = []
    with complete_folder(target) as folder, show_progress(target.name, num_images) as bar:
        text = "".join(f"{name}\n" for name in source.classes)
        (folder / CLASSES).write_text(text, encoding="utf-8", errors="surrogateescape")
        for start in range(0, num_images, per_shard):
            with (folder / f"{len(places):06}{SUFFIX}").open("wb") as file:
                chosen = order[start : start + per_shard]
                places.append(list(_write_shard(file, source, chosen, start)))
            bar.advance(len(chosen))
    header, arrays = _as_index(facts_of(_shard_files(target)), places, source.classes)
    del header["times"]  # the checksums find what changes, so that shards and index can be copied
    write_index(index_path(target), {**header, COVERS_LABELS: True}, arrays)
    return len(places)


def _write_shard(file: io.BufferedWriter, source: Source, chosen: Sequence[int], start: int) -> Iterator[_Place]:
    """Write a tar file of the images ``chosen`` and yield where they are; the first has the number ``start``."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, index in enumerate(chosen, start=start):
            key, target, encoded = f"{number:09}", int(source.targets[index]), source.read(index)
            name = os.fsdecode(source.names[index])
            extension = os.path.splitext(name)[1].lower()
            if extension not in EXTENSIONS:  # of a row of a Parquet file, which need not have a name
                with naming(printable(os.path.join(source.root, name)), "an image"):
                    extension = extension_of(encoded)
            _add(tar, key + extension, encoded)
            # The member that was added last ends where the file does, but for what fills up its last block.
            offset, label = tar.offset - _padded(len(encoded)), str(target).encode()
            _add(tar, f"{key}.cls", label)
            yield _Place(key, offset, len(encoded), target, _checksum(encoded, label))


def _padded(length: int) -> int:
    """Return how many bytes a member of a tar file takes for ``length`` bytes."""
    return -(-length // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _checksum(encoded: bytes, label: bytes) -> int:
    return zlib.crc32(label, zlib.crc32(encoded))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its other fields are always the same
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def check_places(index: Index) -> None:
    """Raise DataError for an index whose shards have names that lead elsewhere, or whose images are not in them."""
    shards = index.header.get("shards")
    if not isinstance(shards, list) or not all(map(_is_shard, shards)):
        raise index.unusable("its shards have names or sizes that no shards have")
    index.check_range("shards", 0, len(shards))
    index.check_range("lengths", 0, MAX_FILE_BYTES)
    sizes = np.array([size for _, size in shards], dtype=np.int64)[index.arrays["shards"]]
    index.check_range("offsets", 0, sizes - index.arrays["lengths"] + 1)


def _is_shard(fact: object) -> bool:
    """Return whether ``fact`` is a name that leads nowhere else, and a size."""
    if not (isinstance(fact, list) and len(fact) == 2 and isinstance(fact[0], str)):
        return False
    name, size = fact
    return os.path.basename(name) == name and name.endswith(SUFFIX) and is_whole(size, 0, MAX_SHARD_BYTES)


def _index_of(root: Path) -> Index:
    """Return the index of the shards in ``root``, which is made if there is none."""
    index = read_index(root, SHARDS, COLUMNS, _shard_files(root), write_shard_index)
    check_places(index)
    if (root / CLASSES).exists() and _class_names(root, 0) != index.header["classes"]:
        raise DataError(f"{CLASSES} has other names than the index; {printable(index.path)}: {ADVICE}")
    return index


def _indexed(root: Path) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Return header and arrays of the index of the tar files in ``root``, of which headers and labels are read."""
    shards = _shard_files(root)
    facts = facts_of(shards)  # before the shards are read, so that a later change is noticed
    places = [list(_places_in(shard)) for shard in shards]
    most = max((place.target for share in places for place in share), default=-1)
    return _as_index(facts, places, _class_names(root, most + 1))


def _class_names(root: Path, num_classes: int) -> list[str]:
    path = root / CLASSES
    if not path.exists():
        return [str(number) for number in range(num_classes)]
    names = read_text(path, NAMES, errors="surrogateescape").removesuffix("\n").split("\n")
    if len(names) < num_classes:
        raise DataError(
            f"there are {len(names)} names of classes, but an image is of class {num_classes - 1}; {printable(path)}: "
            "give a name to each, one per line"
        )
    return names


def _as_index(
    facts: dict[str, list[Any]], places: Sequence[Sequence[_Place]], classes: Sequence[str]
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Return header and arrays of the index of shards, given the `facts_of` and the images of each."""
    flat = [place for share in places for place in share]
    shares = zip(facts["shards"], places, strict=True)
    names = [os.fsencode(f"{shard}/{place.key}") for (shard, _), share in shares for place in share]
    return {"kind": SHARDS, "classes": list(classes), **facts}, {
        "names": np.array(names, dtype=bytes),
        "targets": np.array([place.target for place in flat], dtype=np.int32),
        "shards": np.repeat(np.arange(len(places), dtype=np.int32), [len(share) for share in places]),
        "offsets": np.array([place.offset for place in flat], dtype=np.int64),
        "lengths": np.array([place.length for place in flat], dtype=np.int32),
        "checksums": np.array([place.checksum for place in flat], dtype=np.int64),
    }


def _shard_files(root: Path) -> list[Path]:
    try:
        names = [entry.name for entry in os.scandir(root) if entry.name.endswith(SUFFIX) and entry.is_file()]
    except OSError:  # which whatever looks for a folder of images will report
        return []
    return [root / name for name in sorted(names) if not name.startswith(".")]


def _places_in(path: Path) -> Iterator[_Place]:
    """Yield where the images of a tar file are; DataError for one that is damaged, or has a sample without a class."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            headers: Any = _Headers(file)  # it has the methods of a file that tarfile uses
            with tarfile.open(fileobj=headers, mode="r:") as tar:
                yield from _places_of(tar, file, num_bytes)
    except ZooError as error:
        raise DataError(f"{error}; {printable(path)}: replace the shard, or make it anew") from error
    except (tarfile.TarError, OSError, ValueError, OverflowError, EOFError, RecursionError) as error:
        reason = printable(str(error)) or type(error).__name__
        raise DataError(
            f"the shard cannot be read: {reason}; {printable(path)}: replace it, or make it anew"
        ) from error


def _places_of(tar: Any, file: IO[bytes], num_bytes: int) -> Iterator[_Place]:
    """Yield where the images of an open tar file are, whose ``file`` has ``num_bytes``.

    Nothing of a member is kept but its place: a member can hold as much as the longest header that came before it.
    """
    sample: dict[str, _Member] = {}
    key = ""
    while (member := tar.next()) is not None:
        tar.members.clear()
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise DataError(f"{printable(member.name)} is no file but a link or a device")
        if not 0 <= member.size <= num_bytes - member.offset_data:
            raise DataError(f"{printable(member.name)} is cut off")
        folder, name = os.path.split(member.name)
        start, _, extension = name.partition(".")
        if os.path.join(folder, start) != key:
            yield from _place_of(file, key, sample)
            key, sample = os.path.join(folder, start), {}
        if extension.lower() in sample:
            raise DataError(f"{printable(member.name)} is there twice")
        sample[extension.lower()] = _Member(member.offset_data, member.size)
    yield from _place_of(file, key, sample)
    _check_end(file, tar.offset, num_bytes)


def _check_end(file: IO[bytes], place: int, num_bytes: int) -> None:
    """Raise DataError unless nothing but zeros, a block of them at least, follows what tarfile takes for the end.

    A header that is cut off or damaged is an end to tarfile, too, and the images behind it would be lost.
    """
    file.seek(place)
    is_zero = num_bytes - place >= tarfile.BLOCKSIZE
    while is_zero and (piece := file.read(PIECE_BYTES)):
        is_zero = not any(piece)
    if not is_zero:
        raise DataError(f"it is cut off or damaged behind byte {place:,}")


class _Headers:
    """The part of a tar file that tarfile reads: headers, of which a long one is refused before it takes memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header takes {size:,} bytes")
        return self._file.read(size)


def _place_of(file: IO[bytes], key: str, sample: dict[str, _Member]) -> Iterator[_Place]:
    """Yield the place of the image of a sample; none if there is no sample yet."""
    if not sample:
        return
    images = [member for extension, member in sample.items() if f".{extension}" in EXTENSIONS]
    if len(images) != 1:
        raise DataError(f"sample {printable(key)} has {len(images)} images, not one")
    if images[0].size > MAX_FILE_BYTES:
        raise DataError(f"the image of sample {printable(key)} has {images[0].size:,} bytes, more than any may have")
    label = sample.get("cls") or sample.get("json")
    if label is None:
        raise DataError(f"sample {printable(key)} has no class: neither {printable(key)}.cls nor .json")
    if label.size > MAX_LABEL_BYTES:
        raise DataError(f"the class of sample {printable(key)} takes {label.size:,} bytes")
    file.seek(label.offset)
    target = _target_of(file.read(label.size), label is sample.get("cls"), key)
    yield _Place(key, images[0].offset, images[0].size, target)


def _target_of(content: bytes, is_number: bool, key: str) -> int:
    try:
        target = int(content.decode("ascii")) if is_number else json.loads(content)["label"]
    except (ValueError, KeyError, TypeError, RecursionError):
        target = None
    if type(target) is not int or not 0 <= target < MAX_CLASSES:
        raise DataError(
            f"sample {printable(key)} has no class: {'its .cls' if is_number else 'label in its .json'} is not a whole "
            f"number from 0 to {MAX_CLASSES - 1:,}"
        )
    return target
