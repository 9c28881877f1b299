"""Writing shards: tar files in webdataset's format, and an index with a checksum of each image.

Tested by tests/data/test_shards.py.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from zoo.data.index import facts_of, index_path, write_index
from zoo.data.prepare.output import ShowProgress, complete_folder
from zoo.data.shards import CLASSES, SUFFIX, ImagePosition, checksum, index_content, padded, shard_files
from zoo.data.source import FolderSource


def write_shards(
    source: FolderSource, target: Path, *, per_shard: int, seed: int | None, show_progress: ShowProgress
) -> int:
    """Write the images of ``source`` to ``target``/000000.tar and so on, and their index; return the number of shards.

    Encoded images are copied unchanged. The bytes of the shards depend only on the images, ``seed`` and ``per_shard``.
    ``target`` is renamed into place when it is complete. Raises DataError if ``target`` exists, and if an image cannot
    be read.

    Args:
    - `per_shard`: images per shard; the last one may have fewer.
    - `seed`: seed of the shuffle; None keeps the order.
    """
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
                positions.append(list(_write_shard(file, source, chosen, start)))
            bar.advance(len(chosen))
    header, arrays = index_content(facts_of(shard_files(target)), positions, source.classes)
    del header["times"]  # the checksums detect changes, so shards and index can be copied
    write_index(index_path(target), header, arrays)
    return len(positions)


def _write_shard(
    file: io.BufferedWriter, source: FolderSource, chosen: Sequence[int], start: int
) -> Iterator[ImagePosition]:
    """Write the images ``chosen`` to a tar file, numbered from ``start``; yield their positions."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, index in enumerate(chosen, start=start):
            encoded, target = source.read(index), int(source.targets[index])
            key, extension = f"{number:09}", os.path.splitext(os.fsdecode(source.names[index]))[1].lower()
            _add(tar, key + extension, encoded)
            # The content of the last member is at the end of the file, padded to whole blocks.
            offset, label = tar.offset - padded(len(encoded)), str(target).encode()
            _add(tar, f"{key}.cls", label)
            yield ImagePosition(key, offset, len(encoded), target, checksum(encoded, label))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # other fields have fixed defaults
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
