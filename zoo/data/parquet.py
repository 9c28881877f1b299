"""Images in Parquet files as Hugging Face distributes them, of which row groups are read, and never a whole file.

A row is an image: the column `image` holds its file as {bytes, path}, the column `label` the number of its class. The
names of the classes are in the metadata of the schema. pyarrow reads the files; it is imported where there are some.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo.data.classes import as_imagenet_wnids
from zoo.data.index import Index, facts_of, index_path, read_index, write_index
from zoo.data.reading import naming
from zoo.data.scan import check_filled
from zoo.errors import DataError, ZooError, brief, listed, printable
from zoo.limits import MAX_CLASSES, MAX_FILE_BYTES, is_list_of

logger = logging.getLogger(__name__)

PARQUET = "Parquet files"  # the kind of their index
SUFFIX = ".parquet"
SPLITS = {"train": ("train",), "val": ("val", "validation")}  # what Hugging Face calls them
# The number of a file and how many there are; older data sets have a hash after these.
OF_SEVERAL = re.compile(r"-\d{5}-of-(\d{5})(?:-\w+)?\.parquet")
IMAGE, LABEL = "image.bytes", "label"
PATH = "image.path"
MAX_PATH_BYTES = 128  # of the end of a path that becomes part of an image's name
# Unpacked row groups that a process keeps, in bytes of images; a single row group may have more.
CACHE_BYTES = 256 * 2**20
MAX_GROUP_BYTES = 2**30
BATCH_ROWS = 64  # unpacked at a time
ADVICE = "download it again, or make it anew"


class _File(NamedTuple):
    """What the index has to know of a file: of its rows, of its row groups, and the names of the classes."""

    names: list[bytes]
    targets: np.ndarray
    group_rows: list[int]
    group_bytes: list[int]
    classes: list[str] | None


class ParquetImages:
    """The images of the Parquet files of a split, in the order of the files and of their rows.

    The index is read from the file beside ``root``, or made on first use, see `zoo.data.index.read_index`. A process
    keeps row groups of at most `CACHE_BYTES` unpacked, or one of any size up to `MAX_GROUP_BYTES`. Raises DataError
    for files that are damaged or have another schema, for a row without a class, for an index that does not fit the
    files, and without pyarrow.

    Args:
    - `root`: the folder DATA/train or DATA/val, which need not exist, see `parquet_files`.
    - `allow_empty_classes`: whether classes may have no image.
    """

    def __init__(self, root: Path, allow_empty_classes: bool = False) -> None:
        _load_pyarrow(root)
        files = parquet_files(root)
        _warn_of_missing(files)
        self.root = files[0].parent
        self._index = _index_of(root, files)
        self._set_state()
        self.classes = [str(name) for name in self._index.header["classes"]]
        check_filled(root, self.classes, np.unique(self.targets).tolist(), allow_empty_classes)

    def _set_state(self) -> None:
        arrays = self._index.arrays
        self.names, self.targets = arrays["names"], arrays["targets"]
        # Where row groups end among all images, how many bytes they take, and which one of which file each is.
        self._ends, self._bytes = arrays["group_ends"], arrays["group_bytes"]
        self._files, self._numbers = arrays["group_files"], arrays["group_numbers"]
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """What distinguishes the images besides their names, which may be the numbers of rows."""
        return self.targets, self._ends, self._bytes

    def read(self, index: int) -> bytes:
        """Return the bytes of the file of image ``index``; Unreadable also if the row has none."""
        with naming(printable(os.path.join(self.root, os.fsdecode(self.names[index]))), "an image"):
            group = int(np.searchsorted(self._ends, index, side="right"))
            images = self._unpacked(group)
            image = images[index - int(self._ends[group])]  # counted from the end, where a negative number leads
            if not image.is_valid:
                raise ValueError(f"the row has no {IMAGE}")
            encoded = image.as_buffer()
            if encoded.size > MAX_FILE_BYTES:
                raise ValueError(f"it has {encoded.size:,} bytes, more than {MAX_FILE_BYTES:,}")
            return bytes(encoded)

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, (n,) int64.

        Row groups are in a random order, and images change their places among those of ``window`` row groups in a row,
        as each worker has to unpack these. Without a window there are as many as a worker keeps. Raises DataError for
        a window of more than that.
        """
        largest = max(1, int(self._bytes.max()))
        most = max(1, CACHE_BYTES // largest)
        if window is not None and window > most:
            raise DataError(
                f"input.shuffle_shards = {window}: row groups have up to {largest:,} bytes, of which a worker keeps "
                f"{CACHE_BYTES:,}; {printable(self.root)}: give at most {most}, or make shards with zoo data shard"
            )
        rows = torch.from_numpy(np.diff(self._ends, prepend=0))
        windows = torch.randperm(len(rows), generator=generator).repeat_interleave(rows) // (window or most)
        shuffled = torch.randperm(len(windows), generator=generator)
        return shuffled[windows[shuffled].argsort(stable=True)]

    def _unpacked(self, group: int) -> Any:
        """Return the images of a row group, an array of pyarrow; those used longest ago are dropped for them."""
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            rows = int(self._ends[group]) - (int(self._ends[group - 1]) if group else 0)
            name = self._index.header["shards"][int(self._files[group])][0]
            images = self._kept[group] = _images_of(self.root / name, int(self._numbers[group]), rows)
            while len(self._kept) > 1 and sum(other.nbytes for other in self._kept.values()) > CACHE_BYTES:
                self._kept.popitem(last=False)
            return images

    def __getstate__(self) -> dict[str, object]:
        return {"root": self.root, "classes": self.classes, "_index": self._index}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        self._set_state()


def parquet_files(root: Path) -> list[Path]:
    """Return the Parquet files of the split ``root``, DATA/train or DATA/val, in the order of their names.

    They are in that folder, or, where there is none, where Hugging Face has them: DATA/data/train-*.parquet,
    DATA/train-*.parquet, and DATA/validation/*.parquet, with "validation" or "val". Raises DataError if they are in
    several of these places, or if their numbers show that there are several sets of them in one.
    """
    names = SPLITS.get(root.name, (root.name,))
    places = [root.parent / name for name in names]
    found = [_files_in(place, "") for place in ([root] if root.is_dir() else places)]
    if not root.is_dir():
        found += [_files_in(place, f"{name}-") for place in (root.parent, root.parent / "data") for name in names]
    found = [files for files in found if files]
    firsts = [path for files in found for path in (_first_of_sets(files) or files[:1])]
    if len(firsts) > 1:
        raise DataError(
            f"there are several sets of Parquet files: {listed(firsts)}; {printable(root.parent)}: keep one of them, "
            "as they may hold the same images"
        )
    return found[0] if found else []


def write_parquet_index(root: Path) -> int:
    """Write the index of the Parquet files of the split ``root``; return the number of images.

    Labels and paths of all rows are read, but no image. Raises DataError for files that are damaged, or that cannot be
    used.
    """
    _load_pyarrow(root)
    files = parquet_files(root)
    facts = facts_of(files)  # before the files are read, so that a later change is noticed
    parts = [_described(path) for path in files]
    for path, part in zip(files, parts, strict=True):
        if part.classes != parts[0].classes:
            raise DataError(
                f"the names of its classes are not those of {printable(files[0])}; {printable(path)}: {ADVICE}"
            )
    targets = np.concatenate([part.targets for part in parts])
    named = parts[0].classes
    classes = [str(number) for number in range(int(targets.max(initial=-1)) + 1)] if named is None else named
    header = {"kind": PARQUET, "classes": classes, **facts}
    arrays = {
        "names": np.array([name for part in parts for name in part.names], dtype=bytes),
        "targets": targets,
        "group_ends": np.cumsum([rows for part in parts for rows in part.group_rows], dtype=np.int64),
        "group_bytes": np.array([size for part in parts for size in part.group_bytes], dtype=np.int64),
        "group_files": np.repeat(np.arange(len(parts)), [len(part.group_rows) for part in parts]),
        "group_numbers": np.concatenate([np.arange(len(part.group_rows)) for part in parts]),
    }
    try:
        write_index(index_path(root), header, arrays)
    except OSError as error:
        raise DataError(f"the index cannot be written: {error.strerror}; {printable(index_path(root))}") from error
    return len(targets)


def _index_of(root: Path, files: Sequence[Path]) -> Index:
    """Return the index of the ``files``, which is made if there is none."""
    index = read_index(root, PARQUET, {"names": "S", "targets": "i"}, files, write_parquet_index)
    index.check_columns({"group_ends": "i", "group_bytes": "i", "group_files": "i", "group_numbers": "i"})
    index.check_range("group_files", 0, len(files))
    index.check_range("group_numbers", 0, 2**31)
    index.check_range("group_bytes", 0, MAX_GROUP_BYTES + 1)
    ends, num_images = index.arrays["group_ends"], len(index.arrays["names"])
    index.check_range("group_ends", 0, num_images + 1)
    if num_images and (not len(ends) or ends[-1] != num_images or (np.diff(ends) < 0).any()):
        raise index.unusable("its row groups do not end one after the other")
    return index


def _load_pyarrow(root: Path) -> Any:
    """Return pyarrow, with its module for Parquet files; DataError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"Parquet files are read with pyarrow, which cannot be imported ({error}); {printable(root)}: install it "
            'with pip install "zoo[parquet]"'
        ) from error
    return pyarrow


def _open(path: Path) -> Any:
    """Return the file opened by pyarrow; checksums of its parts are compared where it has some.

    It is not mapped into memory, as a process is killed that reads from a mapped file what was cut off.
    """
    return _load_pyarrow(path).parquet.ParquetFile(path, page_checksum_verification=True)


def _images_of(path: Path, group: int, num_rows: int) -> Any:
    """Return the images of a row group, an array of pyarrow; ValueError if it has not ``num_rows``."""
    parts: list[Any] = []
    with _open(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[IMAGE], use_threads=False):
            parts += batch.column(0).flatten()
            # An image that is stored once may be that of many rows.
            if sum(part.nbytes for part in parts) > MAX_GROUP_BYTES:
                raise ValueError(f"row group {group} has more than {MAX_GROUP_BYTES:,} bytes of images")
    images = _load_pyarrow(path).chunked_array(parts)
    if len(images) != num_rows:
        raise ValueError("the file was changed after its index was made")
    return images


def _files_in(folder: Path, start: str) -> list[Path]:
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith(".")]
    except OSError:  # which whatever looks for a folder of images will report
        return []
    return [folder / name for name in sorted(names) if name.startswith(start) and name.endswith(SUFFIX)]


def _first_of_sets(files: Sequence[Path]) -> list[Path]:
    """Return the first file of each set of numbered files: sets have other names, other counts, or the same numbers."""
    firsts: dict[tuple[str, str, int], Path] = {}
    seen: Counter[str] = Counter()
    for path in files:
        if match := OF_SEVERAL.search(path.name):
            part = path.name[: match.end(1)]
            firsts.setdefault((path.name[: match.start()], match[1], seen[part]), path)
            seen[part] += 1
    return list(firsts.values())


def _warn_of_missing(files: Sequence[Path]) -> None:
    """Log which of the files there should be, by the names of the others, are not there."""
    matches = [match for path in files if (match := OF_SEVERAL.search(path.name))]
    if not matches:
        return
    start, count = matches[0].string[: matches[0].start()], matches[0][1]
    present = {match.string[: match.end(1)] for match in matches}
    wanted = (f"{start}-{number:05}-of-{count}" for number in range(int(count)))
    missing = [part for part in wanted if part not in present]
    if missing:
        logger.warning(
            "%d of %d Parquet files are missing (%s); %s: download them unless they are missing on purpose",
            len(missing), int(count), listed(missing, 3), printable(files[0].parent),
        )  # fmt: skip


def _described(path: Path) -> _File:
    """Return what the index has to know of a file; DataError if it cannot be used."""
    try:
        with _open(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            _check_columns(schema)
            has_paths = schema.field("image").type.get_field_index("path") >= 0
            classes = _class_names(schema.metadata or {})
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            column = [metadata.schema.column(number).path for number in range(metadata.num_columns)].index(IMAGE)
            group_bytes = [group.column(column).total_uncompressed_size for group in groups]
            _check_sizes(group_bytes)
            if metadata.num_rows > os.stat(path).st_size:
                raise DataError(f"it has {metadata.num_rows:,} rows, and not even a byte for each of them")
            targets: list[int] = []
            names: list[bytes] = []
            columns = [LABEL, PATH] if has_paths else [LABEL]
            for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                paths = batch.column("image").field("path").to_pylist() if has_paths else [None] * len(batch)
                first, labels = len(names), batch.column(LABEL).to_pylist()
                _check_labels(labels, first, MAX_CLASSES if classes is None else len(classes))
                targets += labels
                names += [_name_of(path.name, row, original) for row, original in enumerate(paths, start=first)]
    except ZooError as error:
        raise DataError(f"{error}; {printable(path)}: {ADVICE}") from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # pyarrow raises OSError, ValueError, KeyError, NotImplementedError and more
        reason = brief(" ".join(str(error).split())) or type(error).__name__
        raise DataError(f"the Parquet file cannot be read: {reason}; {printable(path)}: {ADVICE}") from error
    return _File(names, np.array(targets, dtype=np.int32), [group.num_rows for group in groups], group_bytes, classes)


def _check_columns(schema: Any) -> None:
    """Raise DataError unless there are images and labels."""
    import pyarrow.types as types

    kinds: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
    image, label = kinds.get("image"), kinds.get(LABEL)
    is_image = image is not None and types.is_struct(image) and image.get_field_index("bytes") >= 0
    if image is None or not is_image or not _is_binary(image.field("bytes").type):
        raise DataError(_expected("image", "a struct of bytes and path", image, schema.names))
    if label is None or not types.is_integer(label):
        raise DataError(_expected(LABEL, "whole numbers", label, schema.names))


def _is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _expected(name: str, what: str, kind: Any, columns: Sequence[str]) -> str:
    found = f"there is none, but {listed(columns)}" if kind is None else f"it holds {brief(kind)}"
    return f"column {name} has to hold {what}, as Hugging Face writes it, and {found}"


def _check_sizes(group_bytes: Sequence[int]) -> None:
    for number, size in enumerate(group_bytes):
        if not 0 <= size <= MAX_GROUP_BYTES:
            raise DataError(
                f"row group {number} has {size:,} bytes of images, which have to be unpacked together: more than "
                f"{MAX_GROUP_BYTES:,} are refused"
            )


def _class_names(metadata: dict[bytes, bytes]) -> list[str] | None:
    """Return the names of the classes in the metadata of a schema; None if there are none.

    All of ImageNet's become wnids, see `as_imagenet_wnids`.
    """
    if b"huggingface" not in metadata:
        return None
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][LABEL].get("names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("the metadata of the schema, huggingface, does not say what a label is") from error
    if names is None:  # a column of numbers, and not of classes
        return None
    if not is_list_of(names, lambda name: isinstance(name, str), MAX_CLASSES):
        raise DataError("the names of the classes, in the metadata of the schema, are no list of names")
    return list(as_imagenet_wnids(names))


def _check_labels(labels: Sequence[int | None], first: int, num_classes: int) -> None:
    """Raise DataError for one of the labels of the rows from ``first`` on that is null or no class."""
    for row, label in enumerate(labels, start=first):
        if label is None or not 0 <= label < num_classes:
            raise DataError(f"row {row} has label {label}, not a class from 0 to {num_classes - 1:,}")


def _name_of(file: str, row: int, path: str | None) -> bytes:
    """Return the name of an image: its file, its row, and the end of its path before it became a row, if it has one."""
    original = os.fsencode(os.path.basename(path or ""))[-MAX_PATH_BYTES:]
    return os.path.join(os.fsencode(f"{file}/{row}"), original) if original else os.fsencode(f"{file}/{row}")
