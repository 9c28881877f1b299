"""One process at a time: a lock that the system takes back when its holder dies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.weights.cache import open_own

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("zoo")


@contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[bool]:
    """Hold the lock file ``path``, made where it is missing, and yield True; wait while another process has it.

    Yields False where neither the system nor the file system has locks. The lock file is left behind: removing it
    would let a third process lock a new file while a second still waits for the old one. Raises OSError if it cannot
    be made, or is a symbolic link.
    """
    with open_own(path, "ab") as file:
        yield fcntl is not None and _acquire(file.fileno(), waiting_for)


def _acquire(descriptor: int, waiting_for: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("%s: another process is fetching it; waiting", waiting_for)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True
