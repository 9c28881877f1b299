"""The cache folder, files that are written to a temporary name and renamed, and faults of file systems."""

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


NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # Windows has no FIFOs among its files
DISTRIBUTION = "zoo-lean"  # the name in package indexes, where zoo is another package
# Errors of a file system or of a limit on open files. They may pass, and say nothing about the content of the file.
TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
FILE_SYSTEM_ERRORS = TOO_MANY_FILES | {
    getattr(errno, name)
    for name in (
        "EIO", "EAGAIN", "EBUSY", "EINTR", "ETIMEDOUT", "ESTALE", "EREMOTEIO", "ENOTCONN", "ECONNABORTED",
        "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENOLCK", "ENOMEM",
    )
    if hasattr(errno, name)
}  # fmt: skip
# Errors of file systems that cannot flush: FUSE, shared folders of virtual machines, some network drives.
NO_FLUSH = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}  # of file systems without locks, such as NFS

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

    Raises ConfigError if neither is known: containers may run as a user without home folder.
    """
    if chosen := os.environ.get("ZOO_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "zoo"
    except RuntimeError:
        what = "there is no folder for the cache, as HOME is not set and this user has no home folder"
        raise ConfigError(what, "environment", "set ZOO_CACHE to a folder that can be written") from None


def is_offline() -> bool:
    """Return whether $ZOO_OFFLINE forbids downloads."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Return a regular file, opened for reading without a buffer; OSError for a FIFO or a device.

    It never waits for the writer of a FIFO.
    """
    file = io.FileIO(path, "r", opener=lambda name, flags: os.open(name, flags | NO_WAIT))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device, not a regular file", os.fspath(path))
    return file


def retry(action: Callable[[], T], passes: Callable[[Exception], bool], waits_s: Sequence[float], where: object) -> T:
    """Return ``action()``, which is called again after each of ``waits_s`` if ``passes`` says that its error may pass.

    The last error is raised. Each new try is logged with ``where``.
    """
    for wait_s in waits_s:
        try:
            return action()
        except Exception as error:
            if not passes(error):
                raise
            reason = connection_reason(error)
            logger.warning("%s: %s; next try in %g s", escape(where), reason, wait_s)
            sleep(wait_s)
    return action()


def decode_text(content: bytes, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark; ValueError if it is neither.

    Byte order marks are removed, as Windows editors write them. ``errors`` is for bytes that are not UTF-8.
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
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new temporary file beside ``path``, and rename it to ``path`` when the block ends.

    If the block raises, the temporary file is removed and ``path`` does not change. The folder must exist.
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
    """Write what was written to an open file or folder to the disk, where the file system can do so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FLUSH:
            raise


def flush_folder(folder: Path) -> None:
    """Make the renames in ``folder`` durable, where the system can flush a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Context that holds the lock ``path`` against other processes; filelock.Timeout after ``timeout_s``, if not -1.

    On a file system without locks, the existence of the file ``path``.soft is the lock. A process that is killed
    leaves it there; a later one on the same machine removes it.
    """
    from filelock import FileLock, SoftFileLock  # here, as it needs modules that Windows lacks

    lock: FileLock | SoftFileLock = FileLock(path, timeout=timeout_s, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:  # also a Timeout, which has no number
            raise
        soft = path.with_name(f"{path.name}.soft")
        logger.warning(
            "the file system has no locks (%s): the file %s is the lock; remove it if it stays when no process is left",
            error.strerror, escape(soft),
        )  # fmt: skip
        lock = SoftFileLock(soft, timeout=timeout_s)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes have left of ``path``, which only this process may write."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        temporary.unlink(missing_ok=True)
