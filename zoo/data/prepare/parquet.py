"""Images in Hugging Face's Parquet files, which ``zoo data shard`` converts to tar files.

Each row is an image: the column ``image`` is the encoded image as {bytes, path}, the column ``label`` the class index.
The metadata of the schema has the names of the classes. pyarrow reads the files.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zoo.data.imagenet import NUM_CLASSES, imagenet_names, imagenet_wnids
from zoo.data.reading import naming
from zoo.data.scan import check_filled
from zoo.data.seeding import windowed_permutation
from zoo.errors import DataError, ZooError, escape, join_names, truncate
from zoo.limits import MAX_CLASSES, MAX_FILE_BYTES, is_list_of

logger = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "val": ("val", "validation")}  # Hugging Face's names
# The number of a file and the number of files, followed by a hash in older data sets.
NUMBERED_FILE = re.compile(r"-\d{5}-of-(\d{5})(?:-\w+)?\.parquet")
CACHE_BYTES = 256 * 2**20  # size of the images of row groups that are kept in memory
MAX_GROUP_BYTES = 2**30
BATCH_ROWS = 64  # decompressed at a time
MAX_OTHER_NAMES = 10  # class names unknown to ImageNet; Hugging Face has one, "crane2"
WORDNET_NAMES = {"crane bird": "crane", "maillot tank suit": "maillot, tank suit"}  # torchvision's own names
REMEDY = "download it again, or recreate it"


class _Group(NamedTuple):
    """A row group of a file: its number there, its number of rows, and the bytes of its images."""

    path: Path
    number: int
    num_rows: int
    num_bytes: int


class ParquetImages:
    """The images of the Parquet files of a split, in the order of the files and of their rows; see `Source`.

    Labels are read at once, images on demand. Up to `CACHE_BYTES` of row groups stay in memory, but at least one.
    Raises DataError for damaged files, other schemas, rows without a class, and if pyarrow is missing.

    Args:
    - `root`: the folder DATA/train or DATA/val, which need not exist, see `parquet_files`.
    - `allow_empty_classes`: whether classes may have no image.
    """

    def __init__(self, root: Path, allow_empty_classes: bool = False) -> None:
        _load_pyarrow(root)
        files = parquet_files(root)
        _warn_of_missing(files)
        self.root = files[0].parent
        self._groups: list[_Group] = []
        targets: list[int] = []
        names: list[bytes] = []
        classes = [_read_file(path, self._groups, targets, names) for path in files]
        for path, other in zip(files, classes, strict=True):
            if other != classes[0]:
                raise DataError(f"the names of the classes differ from those of {files[0]}", path, REMEDY)
        self.classes = [str(i) for i in range(max(targets, default=-1) + 1)] if classes[0] is None else classes[0]
        self.targets, self.names = np.array(targets, dtype=np.int32), np.array(names, dtype=bytes)
        self._ends = np.cumsum([group.num_rows for group in self._groups], dtype=np.int64)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        check_filled(root, self.classes, np.unique(self.targets).tolist(), allow_empty_classes)

    @property
    def details(self) -> tuple[np.ndarray, ...]:
        """The targets, see `Source`."""
        return (self.targets,)

    def read(self, index: int) -> bytes:
        """Return the encoded image ``index``; Unreadable if the row has none."""
        with naming(escape(os.path.join(self.root, os.fsdecode(self.names[index]))), "an image"):
            group = int(np.searchsorted(self._ends, index, side="right"))
            image = self._load(group)[index - int(self._ends[group])]  # counted from the end of the group
            if not image.is_valid:
                raise ValueError("the row has no image.bytes")
            encoded = image.as_buffer()
            if encoded.size > MAX_FILE_BYTES:
                raise ValueError(f"it has {encoded.size:,} bytes, more than {MAX_FILE_BYTES:,}")
            return bytes(encoded)

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, (n,) int64, that decompresses each row group once.

        It needs ``window`` row groups at a time, by default as many as fit into `CACHE_BYTES`.
        """
        largest = max(1, *(group.num_bytes for group in self._groups))
        window = window or max(1, CACHE_BYTES // largest)
        rows = torch.from_numpy(np.diff(self._ends, prepend=0))
        groups = torch.arange(len(rows)).repeat_interleave(rows)
        return windowed_permutation(groups, len(rows), window, generator)

    def _load(self, number: int) -> Any:
        """Return the images of a row group, a pyarrow array, and evict the least recently used row groups."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        images = self._kept[number] = _read_images(self._groups[number])
        while len(self._kept) > 1 and sum(other.nbytes for other in self._kept.values()) > CACHE_BYTES:
            self._kept.popitem(last=False)
        return images


def parquet_files(root: Path) -> list[Path]:
    """Return the Parquet files of the split ``root``, DATA/train or DATA/val, in the order of their names.

    They are in that folder. If it does not exist, they are where Hugging Face puts them: DATA/data/train-*.parquet,
    DATA/train-*.parquet, and DATA/validation/*.parquet, with "validation" or "val". Raises DataError if there are
    several sets of files, in several of these places or by their numbers.
    """
    if root.is_dir():
        found = [sorted(root.glob("*.parquet"))]
    else:
        names = SPLITS.get(root.name, (root.name,))
        patterns = [f"{place}.parquet" for name in names for place in (f"{name}/*", f"{name}-*", f"data/{name}-*")]
        found = [sorted(root.parent.glob(pattern)) for pattern in patterns]
    found = [[path for path in files if not path.name.startswith(".")] for files in found]
    found = [files for files in found if files]
    firsts = [path for files in found for path in (_first_of_sets(files) or files[:1])]
    if len(firsts) > 1:
        what = f"there are several sets of Parquet files: {join_names(firsts)}"
        raise DataError(what, root.parent, "keep one of them, as they may hold the same images")
    return found[0] if found else []


def as_imagenet_wnids(names: Sequence[str]) -> Sequence[str]:
    """Return the wnids of ImageNet if ``names`` are its 1000 class names in order, otherwise ``names``.

    Synonyms may follow a name ("tench, Tinca tinca"), and a few names may be unknown. Raises DataError if the names of
    ImageNet are in another order, or if two classes have the same name.
    """
    if len(names) == NUM_CLASSES:
        known = [WORDNET_NAMES.get(name, name) for name in imagenet_names()]
        first = [name.split(",")[0].strip() for name in names]
        others = [first[number] for number in range(len(names)) if known[number] not in (first[number], names[number])]
        if len(others) <= MAX_OTHER_NAMES and set(known).isdisjoint(others):
            return imagenet_wnids()
        if sum(name in known for name in first) > NUM_CLASSES // 2:
            raise DataError("the names of the classes are ImageNet's, but are not in the order of their wnids")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"several classes have the same name: {join_names(twice)}")
    return names


def _load_pyarrow(path: Path) -> Any:
    """Return pyarrow with pyarrow.parquet imported; DataError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        what = f"Parquet files are read with pyarrow, which cannot be imported ({error})"
        raise DataError(what, path, 'install it with pip install "zoo-lean[parquet]"') from error
    return pyarrow


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with pyarrow, which verifies the checksums of its pages, if any."""
    with _load_pyarrow(path).parquet.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


def _read_images(group: _Group) -> Any:
    """Return the images of a row group, a pyarrow array; ValueError if it has changed or is too large."""
    parts: list[Any] = []
    with _opened(group.path) as file:
        for batch in file.iter_batches(BATCH_ROWS, [group.number], columns=["image.bytes"], use_threads=False):
            parts += batch.column(0).flatten()
            # Rows may share an image that is stored once.
            if sum(part.nbytes for part in parts) > MAX_GROUP_BYTES:
                raise ValueError(f"row group {group.number} has more than {MAX_GROUP_BYTES:,} bytes of images")
    images = _load_pyarrow(group.path).chunked_array(parts)
    if len(images) != group.num_rows:
        raise ValueError("the file has changed")
    return images


def _read_file(path: Path, groups: list[_Group], targets: list[int], names: list[bytes]) -> list[str] | None:
    """Append the content of a file to the lists; return its class names, None if it has none."""
    try:
        with _opened(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            _check_columns(schema)
            classes = _class_names(schema.metadata or {})
            columns = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                size = group.column(columns.index("image.bytes")).total_uncompressed_size
                if not 0 <= size <= MAX_GROUP_BYTES:
                    raise DataError(f"row group {number} has {size:,} bytes of images, more than {MAX_GROUP_BYTES:,}")
                groups.append(_Group(path, number, group.num_rows, size))
            if metadata.num_rows > os.stat(path).st_size:
                raise DataError(f"it has {metadata.num_rows:,} rows, and not even a byte for each of them")
            rows = 0
            num_classes = MAX_CLASSES if classes is None else len(classes)
            wanted = [name for name in ("label", "image.path") if name in columns]
            for batch in file.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False):
                labels = batch.column("label").to_pylist()
                _check_labels(labels, rows, num_classes)
                targets += labels
                paths = batch.column("image").field("path").to_pylist() if len(wanted) > 1 else [None] * len(labels)
                names += [_name_of(path.name, row, original) for row, original in enumerate(paths, start=rows)]
                rows += len(labels)
    except ZooError as error:
        raise DataError(error, path, REMEDY) from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # pyarrow raises OSError, ValueError, KeyError, NotImplementedError and more
        reason = truncate(" ".join(str(error).split())) or type(error).__name__
        raise DataError(f"the Parquet file cannot be read: {reason}", path, REMEDY) from error
    return classes


def _check_columns(schema: Any) -> None:
    """Raise DataError unless the columns are images and labels."""
    import pyarrow.types as types

    kinds: dict[str, Any] = dict(zip(schema.names, schema.types, strict=True))
    image, label = kinds.get("image"), kinds.get("label")
    content = None
    if image is not None and types.is_struct(image) and image.get_field_index("bytes") >= 0:
        content = image.field("bytes").type
    if content is None or not (types.is_binary(content) or types.is_large_binary(content)):
        raise DataError(
            f"column image is {truncate(image)}, not a struct of bytes and path; columns: {join_names(kinds)}"
        )
    if label is None or not types.is_integer(label):
        raise DataError(f"column label is {truncate(label)}, not whole numbers; columns: {join_names(kinds)}")


def _class_names(metadata: dict[bytes, bytes]) -> list[str] | None:
    """Return the names of the classes in the metadata of a schema, see `as_imagenet_wnids`; None if it has none."""
    if b"huggingface" not in metadata:
        return None
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"]["label"].get("names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("the metadata of the schema, huggingface, does not describe the labels") from error
    if names is None:  # plain integers without names
        return None
    if not is_list_of(names, lambda name: isinstance(name, str), MAX_CLASSES):
        raise DataError("the names of the classes in the metadata of the schema are not a list of names")
    return list(as_imagenet_wnids(names))


def _check_labels(labels: Sequence[int | None], first: int, num_classes: int) -> None:
    for row, label in enumerate(labels, start=first):
        if label is None or not 0 <= label < num_classes:
            raise DataError(f"row {row} has label {label}, not a class from 0 to {num_classes - 1:,}")


def _name_of(file: str, row: int, path: str | None) -> bytes:
    """Return FILE/ROW/NAME; NAME is the original file name, if the row has one."""
    return os.fsencode("/".join(filter(None, [file, str(row), os.path.basename(path or "")])))


def _first_of_sets(files: Sequence[Path]) -> list[Path]:
    """Return the first file of each set of numbered files. Sets differ in name or count, or repeat numbers."""
    firsts: dict[tuple[str, str, int], Path] = {}
    seen: Counter[str] = Counter()
    for path in files:
        if match := NUMBERED_FILE.search(path.name):
            part = path.name[: match.end(1)]
            firsts.setdefault((path.name[: match.start()], match[1], seen[part]), path)
            seen[part] += 1
    return list(firsts.values())


def _warn_of_missing(files: Sequence[Path]) -> None:
    """Log a warning if numbered files are missing."""
    matches = [match for path in files if (match := NUMBERED_FILE.search(path.name))]
    if matches and len(matches) != int(matches[0][1]):
        logger.warning(
            "%d of %d Parquet files are missing; %s: download them unless they are intentionally missing",
            int(matches[0][1]) - len(matches), int(matches[0][1]), escape(files[0].parent),
        )  # fmt: skip
