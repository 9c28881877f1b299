"""Shards on a server: a web server, S3, Google Cloud Storage, or any other server that fsspec supports.

A shard is fetched when its first image is read. All processes of the machine share the folder CACHE/shards/DIGEST,
where DIGEST depends on the address and on the index.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import fsspec
import requests

from zoo.data.reading import Unreachable, Unreadable
from zoo.data.sources.index import Index, parse_index
from zoo.data.sources.location import RemoteFolder, is_web_address
from zoo.data.sources.shards import Shards
from zoo.errors import DataError, connection_reason, escape
from zoo.files import cache_dir, file_lock, is_offline, remove_leftovers, replace_file, retry
from zoo.tables import bytes_text, counted

logger = logging.getLogger(__name__)

WAITS_S = (1.0, 2.0, 4.0, 8.0)  # delays before retries to fetch a file
TIMEOUTS_S = (10.0, 30.0)  # connection timeout, and timeout between two bytes
MAX_READS = 3
PERMANENT_ERRORS = (MemoryError, ImportError, ValueError, FileNotFoundError, PermissionError, NotADirectoryError)
FETCH_REMEDY = (
    "check the address, where the index has to be beside the folder of the shards (their first use in a local folder "
    "writes it), and the room in the cache, see ZOO_CACHE"
)

T = TypeVar("T")


class RemoteShards(Shards):
    """The shards at an address, with the index that ``zoo data shard`` writes beside them.

    Raises Unreachable if they cannot be fetched or cached.

    Args:
    - `root`: the folder of the shards.
    - `allow_empty_classes`: whether classes may have no image.
    """

    root: RemoteFolder

    def __init__(self, root: RemoteFolder, allow_empty_classes: bool = False) -> None:
        index, folder = _fetch_index(root)
        self._begin(root, folder, index, allow_empty_classes)
        shards = index.header["shards"]
        logger.info(
            "reading %s, %s, from %s, cached in %s",
            counted(len(shards), "shard"), bytes_text(sum(size for _, size in shards)), escape(root), escape(folder),
        )  # fmt: skip

    def read(self, index: int) -> bytes:
        """Return the bytes of image ``index``; a damaged shard is fetched again."""
        name, size = self._index.header["shards"][self._shards[index]]
        path, address, reason = self._folder / name, self.root / name, ""
        for _ in range(MAX_READS):
            if not path.exists():
                _retry(lambda: _fetch(address, size, path), address)
            try:
                return super().read(index)
            except Unreadable as error:
                reason = str(error)
                path.unlink(missing_ok=True)
        raise Unreachable(reason, address, FETCH_REMEDY)


def _fetch(address: RemoteFolder, size: int, path: Path) -> None:
    """Fetch a shard of ``size`` bytes to ``path``, unless another process does so first."""
    with file_lock(path.with_suffix(".lock")):
        if path.exists():
            return
        remove_leftovers(path)
        with replace_file(path) as temporary, _open(address) as source, temporary.open("wb") as file:
            shutil.copyfileobj(source, file)
            if file.tell() != size:
                raise DataError(f"the shard has {file.tell():,} bytes, and its index says {size:,}")


def _fetch_index(root: RemoteFolder) -> tuple[Index, Path]:
    """Fetch the index of the shards; return it and the cache folder for shards of this address and index."""
    address = root.parent / f"{root.name}.index"
    if is_offline():
        raise Unreachable("ZOO_OFFLINE is set", root, "unset it, or give a folder of this machine")
    cache = cache_dir()

    def fetch() -> tuple[Index, Path]:
        with _open(address) as source:
            content = source.read()
        index = parse_index(content, address)
        folder = cache / "shards" / hashlib.sha256(f"{address}\0".encode() + content).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        return index, folder

    return _retry(fetch, address)


def _retry(fetch: Callable[[], T], address: RemoteFolder) -> T:
    """Call ``fetch`` and return its result; retry after transient faults. Raises Unreachable if it fails."""
    try:
        return retry(fetch, lambda error: not isinstance(error, PERMANENT_ERRORS), WAITS_S, address)
    except MemoryError:
        raise
    except Exception as error:  # each kind of server has its own errors
        raise Unreachable(f"the file cannot be fetched: {connection_reason(error)}", address, FETCH_REMEDY) from error


@contextmanager
def _open(address: RemoteFolder) -> Iterator[Any]:
    """Opens the file at ``address``. Reads web servers with requests, because fsspec would need aiohttp."""
    if not is_web_address(address.url):
        with fsspec.open(address.url, "rb") as file:
            yield file
        return
    url = f"{address.parent.url}/{quote(address.name)}{address.query}"
    encoding = {"Accept-Encoding": "identity"}  # transfer the bytes of the file without compression
    with requests.get(url, stream=True, timeout=TIMEOUTS_S, headers=encoding) as response:
        if response.status_code in (401, 403, 404, 410):
            raise FileNotFoundError(f"the server answered {response.status_code} {response.reason}")
        response.raise_for_status()
        yield response.raw
