"""Shards that are on no file system of this machine: on web servers, in S3, in Google Cloud Storage and others.

What is read is kept in a cache on the disk, whole shards at a time, which all processes of the machine share:
CACHE/shards/DIGEST/NUMBER.BYTES.tar, where DIGEST is one of the address and of the index. No name in it comes from the
server. Shards that nobody has read for the longest time make room for others.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from zoo.data._download_for_remote import (
    TRIES,
    Download,
    DownloadError,
    LockedElsewhereError,
    Transient,
    innermost,
    locked,
    open_own,
)
from zoo.data.index import MAGIC, START, Index
from zoo.data.places import RemoteFolder
from zoo.data.reading import Unreadable, open_regular
from zoo.data.shards import COLUMNS, SHARDS, UNKNOWN, Shards, check_places
from zoo.errors import ConfigError, DataError, ZooError, brief, printable
from zoo.files import cache_dir, is_offline

logger = logging.getLogger(__name__)

WEB = ("http", "https")
CACHE_GB = 50.0  # of shards, unless $ZOO_SHARDS_GB says otherwise
AHEAD = 4  # shards that are fetched before they are read, where these are read in their order
STALE_S = 3600.0  # a download that nothing was added to for so long is one of a killed process
PIECE_BYTES = 2**20
MAX_INDEX_BYTES = 2**33
ADVICE = (
    "check the address: the index has to be beside the folder of the shards; zoo data index makes it where these are, "
    "upload them together"
)


class Unreachable(DataError):
    """Shards cannot be fetched, which is the fault of no single image."""


class RemoteShards(Shards):
    """The shards at an address, with an index file beside them, as `zoo data shard` and `zoo data index` write it.

    Raises Unreachable where they cannot be fetched or kept, and ConfigError for a cache that is too small.

    Args:
    - `root`: the folder of the shards.
    - `allow_empty_classes`: whether classes may have no image.
    """

    root: RemoteFolder

    def __init__(self, root: RemoteFolder, allow_empty_classes: bool = False) -> None:
        with _writing():
            index = _fetched_index(root)
        self._begin(root, index, allow_empty_classes)
        sizes = self._sizes()
        self._check_room(max(sizes, default=0), "a shard", "")
        # The turn of each shard: those of one turn are read together, and before those of the next. Workers that have
        # begun see what `order` puts there. Without `order` shards are read in their order.
        self._turns = torch.zeros(len(sizes), dtype=torch.int32).share_memory_()
        self._set_turns(np.arange(len(sizes)), AHEAD)
        self._turn = UNKNOWN  # that this process has last read of
        logger.info(
            "%d shards of %.3g GB come from %s and are kept in %s, at most %.3g GB at a time",
            len(sizes), sum(sizes) / 1e9, printable(root), printable(_cache()), _bound() / 1e9,
        )  # fmt: skip

    def read(self, index: int) -> bytes:
        """Return the bytes of image ``index``, from the cache; a copy there that was damaged is fetched again."""
        shard = int(self._shards[index])
        if self._turns[shard] != self._turn:
            self._turn = int(self._turns[shard])
            threading.Thread(target=self._fetch_turn, args=(self._turn + 1,), daemon=True).start()
        try:
            return self._read_copy(shard, index)
        except Unreadable:
            with _writing():
                self._copy_of(shard).unlink(missing_ok=True)
        return self._read_copy(shard, index)

    def order(self, generator: torch.Generator, window: int | None) -> Tensor:
        """Return a random order of the images, see `Shards.order`; ConfigError if the cache cannot hold the window.

        From now on the shards of a window are fetched while those of the one before are read, if the cache holds both.
        """
        sizes = sorted(self._sizes(), reverse=True)
        fitting = int((np.cumsum(sizes) <= _bound()).sum())
        what = f"all {len(sizes)} shards" if window is None else f"{min(window, len(sizes))} shards"
        advice = f"set input.shuffle_shards to {fitting} or less, so that fewer are, or "
        self._check_room(sum(sizes[:window]), f"{what}, which are shuffled together,", advice)
        order = super().order(generator, window)
        shards, first = np.unique(self._shards[order.numpy()], return_index=True)
        self._set_turns(shards[first.argsort()], window or len(sizes))
        return order

    def _set_turns(self, shards: np.ndarray, window: int) -> None:
        """Note that so many of ``shards`` at a time are read together, in this order."""
        self._turns.zero_()
        if sum(sorted(self._sizes())[-2 * window :]) <= _bound():
            self._turns[torch.from_numpy(shards).long()] = torch.arange(len(shards), dtype=torch.int32) // window

    def _fetch_turn(self, turn: int) -> None:
        """Fetch the shards of a turn that are not in the cache, but for those that other processes are fetching.

        Room for them is made by shards of earlier turns: those of this turn and of the one before, which is being
        read, count as used last, though nobody may have read of them yet and slower processes of earlier ones.
        """
        current, following = (torch.nonzero(self._turns == of).flatten().tolist() for of in (turn - 1, turn))
        for shard in following:
            with suppress(ZooError, OSError, LockedElsewhereError):  # whoever reads of the shard will meet the fault
                if self._copy_of(shard).exists():
                    continue
                for needed in current + following:
                    with suppress(OSError):  # of a copy that is not there, or belongs to somebody else
                        os.utime(self._copy_of(needed))
                self._fetch(shard, waiting_for=None)

    def _sizes(self) -> list[int]:
        return [size for _, size in self._index.header["shards"]]

    def _check_room(self, num_bytes: int, what: str, advice: str) -> None:
        if num_bytes > _bound():
            wanted = math.ceil(num_bytes / 1e8) / 10
            raise ConfigError(
                f"{what} of {printable(self.root)} may take {num_bytes / 1e9:.3g} GB, and the cache of shards holds "
                f"{_bound() / 1e9:.3g} GB; {advice}set ZOO_SHARDS_GB to {wanted:g} or more, with so much room in "
                f"{printable(_cache())}"
            )

    def _copy_of(self, shard: int) -> Path:
        """Return the file of the cache that a shard is in, or will be once it is fetched."""
        return self._index.path.parent / f"{shard:06}.{self._size_of(shard)}.tar"

    def _size_of(self, shard: int) -> int:
        size: int = self._index.header["shards"][shard][1]
        return size

    def _read_copy(self, shard: int, index: int) -> bytes:
        """Return the bytes of an image from the copy of its shard, which is fetched unless it is there.

        The copy is opened anew for each image, which takes microseconds, so that what is removed leaves the disk.
        """
        path = self._copy_of(shard)
        while True:
            try:
                with self._naming(index):
                    file = open_regular(path, getattr(os, "O_NOFOLLOW", 0))
                break
            except Unreadable as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                with _writing():
                    self._fetch(shard)
        try:
            with suppress(OSError):  # of a cache that belongs to somebody else
                os.utime(file)
            with self._naming(index):
                return self._read_from(file, index)
        finally:
            os.close(file)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_turns": self._turns, "_turn": UNKNOWN}

    def _fetch(self, shard: int, waiting_for: str | None = "") -> None:
        """Bring a shard into the cache, unless another process has done so; for ``waiting_for`` see `locked`."""
        path, (name, size) = self._copy_of(shard), self._index.header["shards"][shard]
        with locked(path.with_suffix(".lock"), waiting_for) as is_alone:
            if path.exists():
                return
            part = path.with_name(f"{path.name}.part" if is_alone else f"{path.name}.{secrets.token_hex(4)}.part")
            with locked(_cache() / "lock", waiting_for=""):
                _make_room(size, part)
                part.touch()  # from now on others count it
            for _ in range(2):
                _receive(self.root, name, part, max_bytes=size, is_whole=lambda file: file.stat().st_size == size)
                fault = self._fault_of(shard, part)
                if fault is None:
                    with open_own(part, "r+b") as file:
                        os.fsync(file.fileno())
                    os.replace(part, path)
                    return
                logger.warning("%s; %s", fault, printable(self.root / name))
                part.unlink()
            raise Unreachable(f"{fault}, twice; {printable(self.root / name)}: {ADVICE}")

    def _fault_of(self, shard: int, path: Path) -> str | None:
        """Return what is wrong with a file that was received; None if it has the images of the shard."""
        size, expected = path.stat().st_size, self._size_of(shard)
        if size != expected:
            return f"a shard of {size:,} bytes came, and its index says {expected:,}"
        with path.open("rb") as file:
            for index in np.flatnonzero((self._shards == shard) & (self._checksums != UNKNOWN)):
                try:
                    self._read_from(file.fileno(), int(index))
                except ValueError:
                    return "a shard came damaged, or was changed after its index was made"
        return None


def _cache() -> Path:
    return cache_dir() / "shards"


def _bound() -> int:
    """Return how many bytes of shards the cache may hold."""
    text = os.environ.get("ZOO_SHARDS_GB", "").strip()
    try:
        gigabytes = float(text) if text else CACHE_GB
    except ValueError:
        gigabytes = -1.0
    if not 0 < gigabytes < 1e9:
        raise ConfigError(f"ZOO_SHARDS_GB must be a number of gigabytes such as 200, got {brief(repr(text))}")
    return round(gigabytes * 1e9)


@contextmanager
def _writing() -> Iterator[None]:
    """Raise Unreachable where the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise Unreachable(
            f"shards cannot be kept: {error.strerror or error}; {printable(error.filename or _cache())}: make "
            f"{printable(_cache())} writable, with room for "
            f"{_bound() / 1e9:.3g} GB, set ZOO_SHARDS_GB to less, or set ZOO_CACHE to another folder"
        ) from error


def _make_room(size: int, part: Path) -> None:
    """Remove the shards that were used longest ago until ``size`` bytes more are within the bound.

    A download counts with the size that it will have. It is removed only if its process must have been killed.
    """
    used: list[tuple[float, Path]] = []
    total = size
    for path in _cache().glob("*/*.tar*"):
        with suppress(FileNotFoundError):  # downloads get their final names meanwhile
            changed = path.stat().st_mtime
            if path == part:
                continue
            total += int(path.name.split(".")[1])
            if path.suffix == ".tar" or changed < time.time() - STALE_S:
                used.append((changed, path))
    for _, path in sorted(used):
        if total <= _bound():
            return
        path.unlink(missing_ok=True)
        total -= int(path.name.split(".")[1])


def _fetched_index(root: RemoteFolder) -> Index:
    """Return the index of the shards, from the cache if that has the one of the server."""
    if is_offline():
        raise Unreachable(f"ZOO_OFFLINE is set; {printable(root)}: unset it, or give a folder of this machine")
    folder, name = root.parent, f"{root.name}.index"
    _cache().mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in _cache().glob("*.part"):  # by processes that were killed
        with suppress(FileNotFoundError):  # removed by another process
            if left.stat().st_mtime < time.time() - STALE_S:
                left.unlink()
    part = _cache() / f"{secrets.token_hex(8)}.part"
    try:
        _receive(folder, name, part, max_bytes=START, is_head=True)
        head = part.read_bytes()
        if not head.startswith(MAGIC):
            raise Unreachable(f"the file is no index, or one of another version; {printable(folder / name)}: {ADVICE}")
        place = _cache() / hashlib.sha256(f"{folder.url}/{name}\0".encode() + head).hexdigest()[:32]
        place.mkdir(exist_ok=True)
        with locked(place / "index.lock", waiting_for=""):
            if (place / "index").exists():
                with suppress(Unreachable):  # damaged since
                    return _usable(place / "index", folder / name)
            part.unlink()
            _receive(folder, name, part, max_bytes=MAX_INDEX_BYTES)
            if part.read_bytes()[:START] != head:
                raise Unreachable(f"the index is changing; {printable(folder / name)}: wait until it is uploaded")
            _usable(part, folder / name)
            os.replace(part, place / "index")
        return Index(place / "index", check=False)
    finally:
        part.unlink(missing_ok=True)


def _usable(path: Path, origin: RemoteFolder) -> Index:
    """Return an index that came from ``origin``; Unreachable if it is damaged, or what it says cannot be."""
    try:
        index = Index(path)
        index.check_images(SHARDS, COLUMNS)
        check_places(index)
    except DataError as error:
        raise Unreachable(f"{str(error).partition('; ')[0]}; {printable(origin)}: {ADVICE}") from error
    return index


def _receive(
    folder: RemoteFolder,
    name: str,
    part: Path,
    *,
    max_bytes: int,
    is_head: bool = False,
    is_whole: Callable[[Path], bool] = lambda part: False,
) -> None:
    """Write the file ``name`` of a folder to ``part``; OSError where that is impossible, Unreachable for other faults.

    Args:
    - `max_bytes`: a larger file is refused; with ``is_head`` no more than its beginning of so many bytes is received.
    - `is_whole`: whether a web server that promised more has sent the whole file nevertheless.
    """
    if folder.url.partition("://")[0].lower() not in WEB:
        return _copy(folder, name, part, max_bytes, is_head)
    url, title = f"{folder.url}/{quote(name)}", printable(folder / name)
    if is_head:
        download = Download(url, part, title, _pause, head_bytes=max_bytes, is_quiet=True)
    else:
        download = Download(url, part, title, _pause, max_bytes=max_bytes, is_quiet=True)
    try:
        download.run(is_whole)
    except DownloadError as error:
        raise Unreachable(f"{error}: {ADVICE}") from error
    return None


def _copy(folder: RemoteFolder, name: str, part: Path, max_bytes: int, is_head: bool) -> None:
    """Do what `_receive` does through fsspec; a server that fails is asked again."""
    for tried in range(1, TRIES + 1):
        try:
            with open_own(part, "wb") as file:
                for piece in _pieces(folder, name, max_bytes if is_head else None):
                    file.write(piece)
                    if file.tell() > max_bytes:
                        part.unlink()
                        raise Unreachable(
                            f"the file has more than {max_bytes:,} bytes; {printable(folder / name)}: {ADVICE}"
                        )
            return
        except Transient as problem:
            if tried == TRIES:
                raise Unreachable(
                    f"{problem}, {TRIES} times in a row; {printable(folder / name)}: {ADVICE}"
                ) from problem
            logger.warning("%s: %s; next try in %d s", printable(folder / name), problem, 2 ** (tried - 1))
            _pause(2.0 ** (tried - 1))


def _pieces(folder: RemoteFolder, name: str, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file before ``end``; Transient for a fault that may pass, otherwise Unreachable.

    The file system is made anew for each file, as one that was made before a process forked is of no use in it.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    scheme, where = folder.url.partition("://")[0], printable(folder / name)
    try:
        system, path = url_to_fs(folder.url)
    except ImportError as error:
        package = known_implementations[scheme]["class"].partition(".")[0]
        advice = "install that" if package == "fsspec" else f"pip install {package}"  # fsspec's own need others
        raise Unreachable(
            f"{scheme}:// needs a package that is not installed ({brief(error)}); {where}: {advice}"
        ) from error
    except ValueError as error:
        raise Unreachable(f"the address cannot be used ({brief(error)}); {where}: {ADVICE}") from error
    except Exception as error:  # some connect here, and each has errors of its own
        raise Transient(f"the server cannot be reached ({innermost(error)})") from error
    place = f"{path.rstrip('/')}/{name}"
    try:
        if end is not None:
            yield system.cat_file(place, start=0, end=end)
            return
        with system.open(place, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except (FileNotFoundError, PermissionError) as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else "the file may not be read"
        raise Unreachable(f"{what} ({innermost(error)}); {where}: {ADVICE}") from error
    except Exception as error:  # each kind of file system has errors of its own
        raise Transient(f"the file cannot be read ({innermost(error)})") from error


def _pause(seconds: float) -> None:
    sleep(seconds)
