"""Writing shards: tar files in webdataset's format, and an index with a checksum of each image."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from zoo.data.prepare.output import complete_folder
from zoo.data.sources.folder import FolderSource
from zoo.data.sources.index import index_path
from zoo.data.sources.shards import CLASSES_FILE, SHARD_SUFFIX, write_shard_index


def write_shards(source: FolderSource, target: Path, *, per_shard: int, seed: int | None) -> int:
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
    with complete_folder(target) as folder:
        text = "".join(f"{name}\n" for name in source.classes)
        (folder / CLASSES_FILE).write_text(text, encoding="utf-8", errors="surrogateescape")
        starts = range(0, num_images, per_shard)
        for start in tqdm(starts, desc=target.name, unit="shard", disable=None, leave=False):
            chosen = order[start : start + per_shard]
            file = folder / f"{start // per_shard:06}{SHARD_SUFFIX}"
            with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
                for number, index in enumerate(chosen, start=start):
                    extension = os.path.splitext(os.fsdecode(source.names[index]))[1].lower()
                    _add(tar, f"{number:09}{extension}", source.read(index))
                    _add(tar, f"{number:09}.cls", str(source.targets[index]).encode())
    write_shard_index(target, index_path(target))
    return len(starts)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # other fields have fixed defaults
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
