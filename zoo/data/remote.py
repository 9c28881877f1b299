"""Shards on a server: a web server, S3, Google Cloud Storage, or any other that fsspec knows.

Whole shards are fetched into a disk cache that all processes of the machine share: CACHE/shards/DIGEST/NUMBER.tar,
where DIGEST depends on the address and on the index. The least recently used shards are evicted.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any, TypeVar
from urllib.parse import quote

import fsspec
import numpy as np
import requests
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from zoo.data.index import Index, parse_index
from zoo.data.location import RemoteFolder
from zoo.data.reading import Unreadable
from zoo.data.shards import UNKNOWN, Shards
from zoo.errors import ConfigError, DataError, ZooError, escape, hide_password, truncate
from zoo.files import cache_dir, is_offline

logger = logging.getLogger(__name__)

CACHE_GB = 50.0  # unless $ZOO_SHARDS_GB is set
PREFETCH = 4  # shards that are prefetched where they are read in order
STALE_S = 3600.0  # a partial file that did not grow for so long is a killed process's
TRIES = 5
TIMEOUTS_S = (10.0, 30.0)  # to connect, and between two bytes
MAX_READS = 3
PERMANENT_ERRORS = (ImportError, ValueError, FileNotFoundError, PermissionError, NotADirectoryError)
FETCH_REMEDY = (
    "check the address, where the index has to be beside the folder of the shards (their first use in a local folder "
    "writes it), and the room in the cache, see ZOO_CACHE and ZOO_SHARDS_GB"
)

T = TypeVar("T")


class Unreachable(DataError):
    """Shards cannot be fetched or cached, which is not the fault of a single image."""


class RemoteShards(Shards):
    """The shards at an address, with an index beside them, as ``zoo data shard`` writes it.

    Raises Unreachable if they cannot be fetched or cached, and ConfigError if the cache is too small.

    Args:
    - `root`: the folder of the shards.
    - `allow_empty_classes`: whether classes may have no image.
    """

    root: RemoteFolder

    def __init__(self, root: RemoteFolder, allow_empty_classes: bool = False) -> None:
        index, self._folder = _fetch_index(root)
        self._begin(root, index, allow_empty_classes)
        sizes = self._sizes()
        self._check_room(max(sizes, default=0), "a shard", "")
        # The window of each shard: the shards of one window are read together. The tensor is in shared memory, so
        # workers that already run see what `order` writes.
        self._windows = torch.zeros(len(sizes), dtype=torch.int32).share_memory_()
        self._set_windows(np.arange(len(sizes)), PREFETCH)
        self._window = UNKNOWN  # the last one that this process read from
        logger.info(
            "%d shards, %.3g GB, are read from %s and cached in %s, at most %.3g GB at a time",
            len(sizes), sum(sizes) / 1e9, escape(root), escape(_cache()), _limit() / 1e9,
        )  # fmt: skip

    def read(self, index: int) -> bytes:
        """Return the bytes of image ``index``; a damaged shard is fetched again."""
        shard = int(self._shards[index])
        if self._windows[shard] != self._window:
            self._window = int(self._windows[shard])
            threading.Thread(target=self._prefetch, args=(self._window + 1,), daemon=True).start()
        path, reason = self._copy_of(shard), ""
        for _ in range(MAX_READS):
            self._fetch(shard)
            try:
                with self._naming(index), path.open("rb", buffering=0) as file:
                    os.utime(file.fileno())  # an evicted shard leaves the disk at once, as no file stays open
                    return self._read_from(file.fileno(), index)
            except Unreadable as error:  # damaged, or evicted by another process
                reason = str(error)
                path.unlink(missing_ok=True)
        raise Unreachable(reason, self._address_of(shard), FETCH_REMEDY)

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, see `Shards.order`; ConfigError if the cache is smaller than a window.

        The shards of the next window are prefetched while one is read, if the cache holds both.
        """
        sizes = sorted(self._sizes(), reverse=True)
        num_fitting = int((np.cumsum(sizes) <= _limit()).sum())
        what = f"all {len(sizes)} shards" if window is None else f"{min(window, len(sizes))} shards"
        advice = f"set input.shuffle_shards to {num_fitting} or less, or "
        self._check_room(sum(sizes[:window]), f"{what}, which are shuffled together,", advice)
        order = super().order(generator, window)
        shards, first = np.unique(self._shards[order.numpy()], return_index=True)
        self._set_windows(shards[first.argsort()], window or len(sizes))
        return order

    def _set_windows(self, shards: np.ndarray, window: int) -> None:
        """Announce that ``shards`` are read in this order, ``window`` at a time."""
        self._windows.zero_()
        if sum(sorted(self._sizes())[-2 * window :]) <= _limit():
            self._windows[torch.from_numpy(shards).long()] = torch.arange(len(shards), dtype=torch.int32) // window

    def _prefetch(self, window: int) -> None:
        """Fetch the shards of a window that are neither cached nor being fetched by another process.

        Shards of this window and of the one before count as just used, so that shards of earlier windows are evicted.
        """
        current, following = (torch.nonzero(self._windows == of).flatten().tolist() for of in (window - 1, window))
        for shard in following:
            with suppress(ZooError, OSError, Timeout):  # whoever reads the shard meets the fault
                if self._copy_of(shard).exists():
                    continue
                for needed in current + following:
                    with suppress(OSError):
                        os.utime(self._copy_of(needed))
                self._fetch(shard, timeout_s=0)

    def _sizes(self) -> list[int]:
        return [size for _, size in self._index.header["shards"]]

    def _check_room(self, num_bytes: int, what: str, advice: str) -> None:
        if num_bytes > _limit():
            what = f"{what} take up to {num_bytes / 1e9:.3g} GB, and the cache holds {_limit() / 1e9:.3g} GB"
            needed = f"{advice}set ZOO_SHARDS_GB to {math.ceil(num_bytes / 1e8) / 10:g} or more"
            raise ConfigError(what, self.root, needed)

    def _copy_of(self, shard: int) -> Path:
        """Return the file of the cache for a shard."""
        return self._folder / f"{shard:06}.tar"

    def _address_of(self, shard: int) -> RemoteFolder:
        return self.root / self._index.header["shards"][shard][0]

    def _fetch(self, shard: int, timeout_s: float = -1) -> None:
        """Fetch a shard into the cache, unless it is there; Timeout if another process fetches it for ``timeout_s``."""
        path, size, address = self._copy_of(shard), self._sizes()[shard], self._address_of(shard)

        def fetch() -> None:
            with FileLock(path.with_suffix(".lock"), timeout=timeout_s):
                if path.exists():
                    return
                part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
                with FileLock(_cache() / "lock"):
                    _evict(size)
                    part.touch()
                    os.truncate(part, size)  # counts with its final size from now on
                try:
                    with _open(address.url) as source, part.open("r+b") as file:
                        shutil.copyfileobj(source, file)
                        file.truncate()
                    if part.stat().st_size != size:
                        raise DataError(f"the shard has {part.stat().st_size:,} bytes, and its index says {size:,}")
                    os.replace(part, path)
                finally:
                    part.unlink(missing_ok=True)

        if not path.exists():
            _retry(fetch, address)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_folder": self._folder, "_windows": self._windows, "_window": UNKNOWN}


def _cache() -> Path:
    return cache_dir() / "shards"


def _limit() -> int:
    """Return how many bytes of shards the cache may hold."""
    text = os.environ.get("ZOO_SHARDS_GB", "").strip()
    try:
        gigabytes = float(text) if text else CACHE_GB
    except ValueError:
        gigabytes = -1.0
    if not 0 < gigabytes < 1e9:
        raise ConfigError(f"ZOO_SHARDS_GB must be a number of gigabytes such as 200, got {truncate(repr(text))}")
    return round(gigabytes * 1e9)


def _evict(num_bytes: int) -> None:
    """Delete the least recently used shards until ``num_bytes`` more are within the limit."""
    used: list[tuple[float, int, Path]] = []
    total = num_bytes
    for path in _cache().glob("*/*.tar*"):
        with suppress(FileNotFoundError):  # renamed or evicted meanwhile
            status = path.stat()
            total += status.st_size
            if path.suffix == ".tar" or status.st_mtime < time.time() - STALE_S:
                used.append((status.st_mtime, status.st_size, path))
    for _, size, path in sorted(used):
        if total <= _limit():
            return
        path.unlink(missing_ok=True)
        total -= size


def _fetch_index(root: RemoteFolder) -> tuple[Index, Path]:
    """Return the index of the shards, and the folder of the cache for shards of this address and index."""
    address = root.parent / f"{root.name}.index"
    if is_offline():
        raise Unreachable("ZOO_OFFLINE is set", root, "unset it, or give a folder of this machine")

    def fetch() -> tuple[Index, Path]:
        with _open(address.url) as source:
            content = source.read()
        index = parse_index(content, address)
        folder = _cache() / hashlib.sha256(f"{address.url}\0".encode() + content).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        return index, folder

    return _retry(fetch, address)


def _retry(fetch: Callable[[], T], address: RemoteFolder) -> T:
    """Return ``fetch()``, which is called again after a fault that may pass; Unreachable if it fails."""
    tried = 0
    while True:
        try:
            return fetch()
        except (MemoryError, Timeout):
            raise
        except Exception as error:  # each kind of server has errors of its own
            tried += 1
            reason = truncate(hide_password(str(error)) or type(error).__name__)
            if tried == TRIES or isinstance(error, PERMANENT_ERRORS):
                raise Unreachable(f"the file cannot be fetched: {reason}", address, FETCH_REMEDY) from error
            logger.warning("%s: %s; next try in %d s", escape(address), reason, 2 ** (tried - 1))
            sleep(2.0 ** (tried - 1))


@contextmanager
def _open(url: str) -> Iterator[Any]:
    """Yield the open file at ``url``. Web servers are read through requests, as fsspec would need aiohttp."""
    if not url.lower().startswith(("http://", "https://")):
        with fsspec.open(url, "rb") as file:
            yield file
        return
    folder, _, name = url.rpartition("/")
    encoding = {"Accept-Encoding": "identity"}  # the bytes of the file
    with requests.get(f"{folder}/{quote(name)}", stream=True, timeout=TIMEOUTS_S, headers=encoding) as response:
        if response.status_code in (401, 403, 404, 410):
            raise FileNotFoundError(f"the server answered {response.status_code} {response.reason}")
        response.raise_for_status()
        yield response.raw
