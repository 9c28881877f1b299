"""Writing shards: tar files in webdataset's format, and an index with a checksum of each image.

Tested by tests/data/test_shards.py.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from zoo.data.index import facts_of, index_path, write_index
from zoo.data.prepare.output import ShowProgress, check_free, complete_folder
from zoo.data.prepare.resizing import JPEG_EXTENSION, RESIZED, Resizing
from zoo.data.reading import EXTENSIONS, extension_of, naming, read_many
from zoo.data.shards import CLASSES, SUFFIX, ImagePosition, checksum, index_content, padded, shard_files
from zoo.data.source import Source
from zoo.errors import escape

PIECE = 64  # images that are read at a time and resized in parallel


def write_shards(
    source: Source,
    target: Path,
    *,
    per_shard: int,
    seed: int | None,
    show_progress: ShowProgress,
    resizing: Resizing | None = None,
    workers: int = 1,
) -> int:
    """Write the images of ``source`` to ``target``/000000.tar and so on, and their index; return the number of shards.

    Encoded images are copied unchanged unless ``resizing`` changes them. The bytes of the shards depend only on the
    images, ``seed``, ``per_shard``, and the settings and versions of ``resizing``. ``target`` is renamed into place
    when it is complete. Raises DataError if ``target`` exists, and if an image cannot be read.

    Args:
    - `per_shard`: images per shard; the last one may have fewer.
    - `seed`: seed of the shuffle; None keeps the order.
    - `resizing`: makes large images smaller; its settings are stored in the header of the index.
    - `workers`: threads that resize images.
    """
    check_free(target)
    num_images = len(source.names)
    order: Sequence[int] = range(num_images)
    if seed is not None:
        order = source.order(torch.Generator().manual_seed(seed), None).tolist()
    positions: list[list[ImagePosition]] = []
    with complete_folder(target) as folder, show_progress(target.name, num_images) as bar:
        text = "".join(f"{name}\n" for name in source.classes)
        (folder / CLASSES).write_text(text, encoding="utf-8", errors="surrogateescape")
        for start in range(0, num_images, per_shard):
            with (folder / f"{len(positions):06}{SUFFIX}").open("wb") as file:
                chosen = order[start : start + per_shard]
                images = _read_images(source, chosen, resizing, workers)
                positions.append(list(_write_shard(file, source, chosen, images, start)))
            bar.advance(len(chosen))
    header, arrays = index_content(facts_of(shard_files(target)), positions, source.classes)
    del header["times"]  # the checksums detect changes, so shards and index can be copied
    resized = {} if resizing is None else {RESIZED: resizing.facts()}
    write_index(index_path(target), {**header, **resized}, arrays)
    return len(positions)


def _read_images(
    source: Source, chosen: Sequence[int], resizing: Resizing | None, workers: int
) -> Iterator[tuple[str, bytes]]:
    """Yield the file extension and the content of each of the images ``chosen``, resized by ``workers`` threads."""

    def _prepared(image: tuple[str, bytes]) -> tuple[str, bytes]:
        name, encoded = image
        smaller = None if resizing is None else resizing.apply(encoded, escape(name))
        return (_extension(name, encoded), encoded) if smaller is None else (JPEG_EXTENSION, smaller)

    for start in range(0, len(chosen), PIECE):
        # Only this thread reads, because a source need not support several.
        images = [
            (os.path.join(source.root, os.fsdecode(source.names[index])), source.read(index))
            for index in chosen[start : start + PIECE]
        ]
        yield from read_many(_prepared, images, workers)


def _extension(name: str, encoded: bytes) -> str:
    extension = os.path.splitext(name)[1].lower()
    if extension in EXTENSIONS:
        return extension
    with naming(escape(name), "an image"):  # images of a data set have no file name
        return extension_of(encoded)


def _write_shard(
    file: io.BufferedWriter, source: Source, chosen: Sequence[int], images: Iterable[tuple[str, bytes]], start: int
) -> Iterator[ImagePosition]:
    """Write the ``images`` of the indices ``chosen`` to a tar file, numbered from ``start``; yield their positions.

    An image is its file extension and its content.
    """
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (index, (extension, encoded)) in enumerate(zip(chosen, images, strict=True), start=start):
            key, target = f"{number:09}", int(source.targets[index])
            _add(tar, key + extension, encoded)
            # The content of the last member is at the end of the file, padded to whole blocks.
            offset, label = tar.offset - padded(len(encoded)), str(target).encode()
            _add(tar, f"{key}.cls", label)
            yield ImagePosition(key, offset, len(encoded), target, checksum(encoded, label))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # other fields have fixed defaults
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
