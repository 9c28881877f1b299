"""Consistency checks between ranks: compare settings, code, images and weights before they are used.

Ranks that differ would train different networks under one name, or deadlock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.config.describe import leaves
from zoo.data.dataset import ImageDataset
from zoo.data.loader import Loader
from zoo.data.sampler import TrainBatches, ValBatches
from zoo.engine._process import Process
from zoo.errors import ConfigError, ZooError, join_names

ABSENT = "absent"
SHOWN_DIGITS = 12  # digits of a digest in messages


def check_same_on_all_ranks(
    process: Process, values: Callable[[], Mapping[str, Any]], remedy: str, error: type[ZooError] = ConfigError
) -> None:
    """Raise ``error`` on every rank unless ``values()``, nested dicts of plain values, is equal on all ranks.

    Every rank has to call it; ``values`` is not called in a single-process run. The message names the ranks that differ
    from rank 0, the keys and both values, and ends with ``remedy``.
    """
    if process.world_size == 1:
        return
    of_ranks: list[dict[str, Any]] = process.gather(dict(leaves(values())))
    differences: list[str] = process.broadcast(list(_differences(of_ranks)))
    if differences:
        raise error(f"the ranks of this run differ; {'; '.join(differences)}: {remedy}")


def _differences(of_ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each set of differences from rank 0: the ranks that have it, the keys and both values."""
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(of_ranks[1:], start=1):
        main = of_ranks[0]
        pairs = [
            f"{key} = {own.get(key, ABSENT)}, not {main.get(key, ABSENT)} as on rank 0"
            for key in differing_keys(main, own)
        ]
        if pairs:
            ranks.setdefault(join_names(pairs), []).append(rank)
    for difference, differing_ranks in ranks.items():
        yield f"rank{'s' * (len(differing_ranks) > 1)} {join_names(differing_ranks)}: {difference}"


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the sorted keys whose values differ, or that one of the two lacks."""
    return [key for key in sorted({*first, *second}) if first.get(key, ABSENT) != second.get(key, ABSENT)]


def environment_fingerprint(process: Process, command: str) -> dict[str, Any]:
    """Return the command of this rank, the version of torch, a digest of zoo's sources, the device and the backend."""
    return {
        "command": command,
        "torch": str(torch.__version__),
        "code": _code_digest(),
        "device": process.device.type,
        "backend": dist.get_backend(),
    }


def _code_digest() -> str:
    """Return the first digits of the SHA-256 of the Python sources of this package (names and contents)."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:SHOWN_DIGITS]


def fingerprints(train_loader: Loader[TrainBatches], val_loader: Loader[ValBatches] | None) -> dict[str, Any]:
    """Return the fingerprints of the images of a run, by "train" and "val", see `dataset_fingerprint`."""
    return {
        split: dataset_fingerprint(loader.dataset, loader.batch_sampler.num_images)
        for split, loader in (("train", train_loader), ("val", val_loader))
        if loader is not None
    }


def dataset_fingerprint(images: ImageDataset, count: int) -> dict[str, Any]:
    """Return ``count`` (the number of images in use), the number of classes, and digests of the images.

    The digests cover all names and some file sizes, see `ImageDataset.digests`.
    """
    digests = {key: digest[:SHOWN_DIGITS] for key, digest in images.digests().items()}
    return {"images": count, "classes": len(images.classes), **digests}
