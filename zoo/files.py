"""The cache folder, files that are replaced as a whole, and a lock between processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("zoo")
_lock_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _close_locks() -> None:
    """Close the lock files of the parent: a forked process shares them, and would hold them after it was killed."""
    for file in list(_lock_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


class LockedElsewhereError(Exception):
    """Another process holds the lock; the text says which, as far as it is known."""


def cache_dir() -> Path:
    """Return $ZOO_CACHE, or ~/.cache/zoo when it is not set; the folder need not exist."""
    return Path(os.environ.get("ZOO_CACHE") or Path.home() / ".cache" / "zoo")


def is_offline() -> bool:
    """Return whether $ZOO_OFFLINE says that nothing is to be downloaded."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` as JSON; ValueError for NaN and infinities, which JSON does not have."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8; names of files that are not UTF-8 keep their bytes."""
    write_bytes(path, text.encode("utf-8", errors="surrogateescape"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, see `replacing`; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield the name of a temporary file beside ``path``. The file that the block writes there then replaces ``path``.

    If the block raises, the temporary file is removed and ``path`` stays as it was. ``temporary`` is another name for
    the temporary file, in the same folder. The folder has to exist.
    """
    temporary = temporary or path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open_own(temporary, "r+b") as file:
            os.fsync(file.fileno())  # the bytes are safe on the disk before the file gets its final name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def open_own(path: Path, mode: str) -> IO[bytes]:
    """Open a file of the cache for writing, unless it is a symbolic link or a pipe; raises OSError for those.

    In a cache that others can write to, a link could lead to any file of this user, and a pipe would block.
    """
    return open(path, mode, opener=_open_no_link)


def _open_no_link(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not written through: remove it", path) from None
        raise


@contextmanager
def locked(path: Path, waiting_for: str | None = None) -> Iterator[bool]:
    """Hold the lock file ``path``, made where it is missing, and yield True; the system frees it if the process dies.

    While another process holds it: wait and say so in the log if ``waiting_for`` names what is waited for, wait without
    a word if it is empty, and raise LockedElsewhereError if it is None. Yields False where neither the system nor the
    file system has locks. The lock file is left behind: if it were removed, a third process could lock a new file while
    a second waits for the old one.
    Raises OSError if it cannot be made, or is a symbolic link.
    """
    with open_own(path, "a+b") as file:
        _lock_files.add(file)
        is_alone = fcntl is not None and _acquire(file, waiting_for)
        if is_alone:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.flush()
        yield is_alone


def _acquire(file: IO[bytes], waiting_for: str | None) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting_for is None:
            file.seek(0)
            holder = file.read().decode(errors="backslashreplace").strip()
            raise LockedElsewhereError(holder or "another process") from None
        if waiting_for:
            logger.info("%s: another process is fetching it; waiting", waiting_for)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True
