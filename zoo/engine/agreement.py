"""Checks that all processes of a run were started with the same settings, the same program and the same images.

Processes that differ would train different networks under one name, or wait for each other for ever. They exchange and
compare their settings before anything depends on them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.config import leaves
from zoo.data.folder import ImageDataset
from zoo.engine.process import Process
from zoo.engine.program import SHOWN_DIGITS, code_digest, version_of
from zoo.errors import ConfigError, ZooError, listed

ABSENT = "absent"
NUM_SIZES = 1000


def check_agreement(
    process: Process, facts: Callable[[], Mapping[str, Any]], advice: str, error: type[ZooError] = ConfigError
) -> None:
    """Raise ``error`` on every rank unless the ``facts`` of all ranks are equal; every rank has to call it.

    ``facts`` returns nested dicts of plain values and is not called if there is only one process. The message names
    each rank that differs from rank 0, its keys and both values, and ends with ``advice``.
    """
    if process.world_size == 1:
        return
    shares: list[dict[str, Any]] = process.gather(dict(leaves(facts())))
    complaints: list[str] = process.broadcast(list(_complaints(shares)))
    if complaints:
        raise error(f"the processes of this run were not started alike: {'; '.join(complaints)}: {advice}")


def _complaints(shares: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each set of differences from rank 0: the ranks that have it, the keys and both values."""
    ranks: dict[str, list[int]] = {}
    for rank, share in enumerate(shares[1:], start=1):
        keys = differing_keys(shares[0], share)
        if keys:
            values = [
                f"{key} = {share.get(key, ABSENT)}, not {shares[0].get(key, ABSENT)} as on rank 0" for key in keys
            ]
            ranks.setdefault(listed(values), []).append(rank)
    for difference, differing_ranks in ranks.items():
        yield f"rank{'s' * (len(differing_ranks) > 1)} {listed(differing_ranks)}: {difference}"


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return, sorted, the keys whose values differ or that one of the two lacks."""
    return [key for key in sorted({*first, *second}) if first.get(key, ABSENT) != second.get(key, ABSENT)]


def program_facts(process: Process, command: str) -> dict[str, Any]:
    """Return the command of this rank, the versions of torch and zoo, the digest of its sources, device and backend."""
    return {
        "command": command,
        "torch": str(torch.__version__),
        "zoo": version_of("zoo"),
        "code": code_digest(),
        "device": process.device.type,
        "backend": dist.get_backend(),
    }


def image_facts(images: ImageDataset, count: int) -> dict[str, Any]:
    """Return ``count``, how many of the images are used, and a digest of the names of classes and files."""
    return {"images": count, "classes": len(images.classes), "names": images.names_digest()[:SHOWN_DIGITS]}


def sizes_digest(images: ImageDataset) -> str:
    """Return a digest of the sizes in bytes of `NUM_SIZES` of the files, evenly spread, or of all if there are fewer.

    A network storage takes minutes to tell the sizes of a million files. Images in shards are no files; their sizes are
    part of `ImageDataset.names_digest`.
    """
    digest = hashlib.sha256()
    num_sizes = min(NUM_SIZES, len(images))
    for number in range(num_sizes):
        try:
            size = os.stat(images.file_name(number * len(images) // num_sizes)).st_size
        except (OSError, ValueError):  # ValueError: a zero byte in the name
            size = -1
        digest.update(f"{size} ".encode())
    return digest.hexdigest()[:SHOWN_DIGITS]


def weights_digest(model: nn.Module) -> str:
    """Return the first digits of the sha256 of all values of the network's state dict, which is read whole."""
    digest = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:SHOWN_DIGITS]
