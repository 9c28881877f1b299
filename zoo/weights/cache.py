"""Where zoo keeps what it unpacks and downloads, and how it writes there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

SUFFIX = ".pth.tar"


def cache_dir() -> Path:
    """Return $ZOO_CACHE, or ~/.cache/zoo when it is not set; the folder need not exist."""
    return Path(os.environ.get("ZOO_CACHE") or Path.home() / ".cache" / "zoo")


def weights_dir() -> Path:
    """Return the folder of the cache that holds published weights; it need not exist."""
    return cache_dir() / "weights"


def weights_path(name: str) -> Path:
    """Return where the published weights ``name`` are, or will be once they are fetched and verified."""
    return weights_dir() / f"{name}{SUFFIX}"


def make_weights_dir() -> None:
    """Make the folder of published weights where it is missing.

    A cache that this makes is its owner's alone (mode 0700). One that was there before keeps the rights that somebody
    gave it, so that a group can share it.
    """
    cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    weights_dir().mkdir(exist_ok=True)


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
