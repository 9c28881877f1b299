"""The cache folder, and files that are written to a temporary name and renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

DISTRIBUTION = "zoo-lean"  # the name in package indexes, where zoo is another package
RANDOM_BYTES = 8
TEMPORARY = re.compile(rf"\..*\.[0-9a-f]{{{2 * RANDOM_BYTES}}}\.tmp(\.\w+)?", re.DOTALL)  # names from `replacing`
_lock_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
_swept_folders: set[Path] = set()  # in which this process has removed leftovers


def _close_locks() -> None:
    """Close the locked files of the parent: a forked child shares the locks, and would hold them after the parent."""
    for file in list(_lock_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


def cache_dir() -> Path:
    """Return $ZOO_CACHE, or ~/.cache/zoo if it is not set; the folder need not exist."""
    return Path(os.environ.get("ZOO_CACHE") or Path.home() / ".cache" / "zoo")


def is_offline() -> bool:
    """Return whether $ZOO_OFFLINE forbids downloads."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` as JSON; raises ValueError for NaN and infinities, which JSON does not support."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8; surrogate escapes become the original bytes."""
    write_bytes(path, text.encode("utf-8", errors="surrogateescape"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` as `replacing` does; creates the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yield a new temporary file beside ``path``, and rename it to ``path`` when the block ends.

    If the block raises, the temporary file is removed and ``path`` does not change. A killed process leaves its
    temporary files behind; the next process that writes to the folder removes them, see `remove_leftovers`. The folder
    must exist. The random name of the temporary file ends in ``suffix``.
    """
    if path.parent not in _swept_folders:
        _swept_folders.add(path.parent)
        remove_leftovers(path.parent)
    temporary, lock = _create_temporary(path, suffix)
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # write the bytes to the disk before the rename
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        lock.close()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes from ``folder``.

    A process locks its temporary files while it writes them, so files in use stay. If the file system does not support
    locks, nothing is removed.
    """
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if fcntl is not None and TEMPORARY.fullmatch(entry.name):
                with suppress(OSError), open(entry.path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


def _create_temporary(path: Path, suffix: str) -> tuple[Path, IO[bytes]]:
    """Create an empty file beside ``path``; return its path, and an open file that holds its lock."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(RANDOM_BYTES)}{suffix}")
        lock = temporary.open("xb")
        if fcntl is None:  # Windows cannot replace an open file
            lock.close()
            return temporary, lock
        is_own = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_own = False
        except OSError:  # some network file systems do not support locks
            pass
        if is_own and os.fstat(lock.fileno()).st_nlink:
            _lock_files.add(lock)
            return temporary, lock
        lock.close()  # `remove_leftovers` of another process removes the file


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open a regular file for reading, with additional ``flags`` of `os.open`, and return its descriptor.

    Raises OSError for anything else, because a FIFO would block and a device may never end.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | flags)
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return file
