"""The cache folder, atomic writes (to a temporary name, then renamed), file locks, and faults of file systems."""

from __future__ import annotations

import codecs
import errno
import glob
import io
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from zoo.errors import ConfigError, connection_reason, escape

logger = logging.getLogger(__name__)


NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # Windows has no FIFOs in its file system
DISTRIBUTION = "zoo-lean"  # the name on package indexes, where "zoo" is another package
# Errors of the file system, or too many open files. They may be transient and say nothing about the file's content.
TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
FILE_SYSTEM_ERRORS = TOO_MANY_FILES | {
    getattr(errno, name)
    for name in (
        "EIO", "EAGAIN", "EBUSY", "EINTR", "ETIMEDOUT", "ESTALE", "EREMOTEIO", "ENOTCONN", "ECONNABORTED",
        "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENOLCK", "ENOMEM",
    )
    if hasattr(errno, name)
}  # fmt: skip
# Errors on file systems that cannot flush: FUSE, shared folders of virtual machines, some network drives.
NO_FLUSH = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}  # no locks, as on some NFS mounts

T = TypeVar("T")


def version() -> str:
    """Return the installed version of zoo, or the one in pyproject.toml if this checkout is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        settings = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        found = re.search(r'^version = "(.+)"$', settings, re.MULTILINE)
        assert found is not None, "pyproject.toml names no version"
        return found.group(1)


def cache_dir() -> Path:
    """Return $ZOO_CACHE, or ~/.cache/zoo if it is not set; the folder need not exist.

    Raises ConfigError if there is no home folder either, as for some users of containers.
    """
    if chosen := os.environ.get("ZOO_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "zoo"
    except RuntimeError:
        what = "there is no cache folder: HOME is not set and this user has no home folder"
        raise ConfigError(what, "environment", "set ZOO_CACHE to a writable folder") from None


def is_offline() -> bool:
    """Return whether $ZOO_OFFLINE forbids downloads."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading, unbuffered. Raises OSError for a FIFO or a device.

    Never waits for the writer of a FIFO.
    """
    file = io.FileIO(path, "r", opener=lambda name, flags: os.open(name, flags | NO_WAIT))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device, not a regular file", os.fspath(path))
    return file


def retry(
    action: Callable[[], T], is_transient: Callable[[Exception], bool], waits_s: Sequence[float], where: object
) -> T:
    """Call ``action`` and return its result; after a transient error, retry after each of ``waits_s``.

    Raises the last error, and at once an error for which ``is_transient`` is false. Logs each retry with ``where``.
    """
    for wait_s in waits_s:
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
            reason = connection_reason(error)
            logger.warning("%s: %s; next try in %g s", escape(where), reason, wait_s)
            sleep(wait_s)
    return action()


def decode_text(content: bytes, errors: str = "strict") -> str:
    """Decode a file in UTF-8, or in UTF-16 with a byte order mark. Raises ValueError if it is neither.

    Removes byte order marks, which Windows editors write. ``errors`` handles bytes that are not UTF-8.
    """
    try:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            text = content.decode("utf-16")
        else:
            text = content.decode("utf-8-sig", errors)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    if "\0" in text:  # UTF-16 without a mark
        raise ValueError("it is not UTF-8 text, as it has zero bytes")
    return text


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` as JSON. Raises ValueError for NaN and infinities: JSON does not support them."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8; surrogate escapes become the original bytes."""
    write_bytes(path, text.encode("utf-8", errors="surrogateescape"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically (`replace_file`); create the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a new temporary file beside ``path``, and renames it to ``path`` when the block ends.

    If the block raises, removes the temporary file and leaves ``path`` unchanged. The folder must exist.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            flush_to_disk(file.fileno())  # write the bytes before the rename
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(descriptor: int) -> None:
    """Flush an open file or folder to the disk, if the file system supports it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FLUSH:
            raise


def flush_folder(folder: Path) -> None:
    """Flush ``folder`` to the disk, so that renames in it are durable, if the system supports it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Holds the lock ``path`` against other processes. Raises filelock.Timeout after ``timeout_s``; -1 waits forever.

    On a file system without locks, the existence of the file ``path``.soft is the lock. A killed process leaves the
    file behind; a later process on the same machine removes it.
    """
    from filelock import FileLock, SoftFileLock  # imported late: needs modules that Windows lacks

    lock: FileLock | SoftFileLock = FileLock(path, timeout=timeout_s, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:  # a Timeout has no errno
            raise
        soft = path.with_name(f"{path.name}.soft")
        logger.warning(
            "the file system has no locks (%s): the file %s is the lock; remove it if it is left when no process runs",
            error.strerror, escape(soft),
        )  # fmt: skip
        lock = SoftFileLock(soft, timeout=timeout_s)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of ``path`` that killed processes left. No other process may be writing ``path``."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        temporary.unlink(missing_ok=True)
