"""The cache folder, files that are replaced as a whole, and a lock between processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("zoo")
RANDOM_BYTES = 8
TEMPORARY = re.compile(rf"\..*\.[0-9a-f]{{{2 * RANDOM_BYTES}}}\.tmp(\.\w+)?", re.DOTALL)  # names that `replacing` makes
_lock_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
_swept_folders: set[Path] = set()  # those in which this process has looked for leftovers


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
def replacing(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yield a new temporary file in the folder of ``path``. What the block writes there then replaces ``path``.

    The file is created exclusively, under a random name that ends in ``suffix``, so that nobody can put a link in its
    place beforehand. If the block raises, the temporary file is removed and ``path`` stays as it was. A killed process
    leaves its temporary files behind; the next process that writes to the folder removes them, see `remove_leftovers`.
    The folder has to exist.
    """
    if path.parent not in _swept_folders:
        _swept_folders.add(path.parent)
        remove_leftovers(path.parent)
    temporary, lock = _create_temporary(path, suffix)
    try:
        yield temporary
        with open_own(temporary, "r+b") as file:
            os.fsync(file.fileno())  # the bytes are safe on the disk before the file gets its final name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        lock.close()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes from ``folder``; files that are still being written stay.

    A process locks its temporary files while it writes them. Where the file system has no locks, nothing is removed.
    """
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if fcntl is not None and TEMPORARY.fullmatch(entry.name):
                with suppress(OSError), open_own(Path(entry.path), "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)


def _create_temporary(path: Path, suffix: str) -> tuple[Path, IO[bytes]]:
    """Create an empty file beside ``path`` under a random name; return it, and an open file that holds its lock."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(RANDOM_BYTES)}{suffix}")
        lock = open_own(temporary, "xb")
        if fcntl is None:  # Windows replaces no file that is open
            lock.close()
            return temporary, lock
        is_own = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_own = False
        except OSError:  # some network file systems have no locks
            pass
        if is_own and os.fstat(lock.fileno()).st_nlink:
            _lock_files.add(lock)
            return temporary, lock
        lock.close()  # `remove_leftovers` of another process has removed the file, or is about to


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a file for writing, in a binary mode, unless it is a symbolic link or a pipe; raises OSError for those.

    In a folder that others can write to, a link could lead to any file of this user, and a pipe would block.
    """
    return open(path, mode, buffering, opener=_open_no_link)


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
