"""A file that at most one process has locked at a time."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from zoo.files import open_own

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("zoo")


class LockedElsewhereError(Exception):
    """Another process holds the lock; the text says which, as far as it is known."""


@contextmanager
def locked(path: Path, waiting_for: str | None = None) -> Iterator[bool]:
    """Hold the lock file ``path``, made where it is missing, and yield True; the system frees it if the process dies.

    While another process holds it: wait and say so in the log if ``waiting_for`` names what is waited for, otherwise
    raise LockedElsewhereError. Yields False where neither the system nor the file system has locks. The lock file
    is left behind: if it were removed, a third process could lock a new file while a second waits for the old one.
    Raises OSError if it cannot be made, or is a symbolic link.
    """
    with open_own(path, "a+b") as file:
        # A forked process shares the lock, and would hold it after this process was killed.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=file.close)
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
        logger.info("%s: another process is fetching it; waiting", waiting_for)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True
