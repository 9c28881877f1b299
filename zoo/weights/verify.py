"""Verifies published weights by their md5: one file, or the whole cache."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from zoo.errors import WeightsError, printable
from zoo.weights.cache import SUFFIX, weights_dir, weights_path
from zoo.weights.published import REPLACED_MD5, all_published, entry_of

READ_BYTES = 2**20
Status = Literal["ok", "damaged", "partial", "unknown", "missing"]


@dataclass(frozen=True)
class Finding:
    """What an audit says of one file; ``note`` says why, or what to do."""

    path: Path
    status: Status
    note: str = ""


def open_weights(path: str | os.PathLike[str]) -> IO[bytes]:
    """Return the file at ``path``, opened for reading; a link is followed.

    Raises WeightsError if it cannot be read or is no regular file: a pipe might never say anything.
    """
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode):
            kind = "Is a directory" if stat.S_ISDIR(mode) else "it is no regular file"
            raise OSError(errno.EINVAL, "it is a pipe and no regular file" if stat.S_ISFIFO(mode) else kind)
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{printable(path)}: cannot be read ({reason}); give the path of a weights file") from None


def md5_of(path: str | os.PathLike[str]) -> str:
    """Return the md5 of the file at ``path`` as 32 hexadecimal digits; it is read in pieces.

    Raises WeightsError if it cannot be read.
    """
    with open_weights(path) as file:
        return _md5_of_open(file, path)


def _md5_of_open(file: IO[bytes], path: str | os.PathLike[str]) -> str:
    """Return the md5 of an open file, which is then at its end."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    except OSError as error:
        raise WeightsError(f"{printable(path)}: cannot be read ({error.strerror}); check the disk") from None
    return digest.hexdigest()


def mismatch(name: str, found: str) -> str:
    """Return in words that weights ``name`` have the md5 ``found`` and not their own."""
    wrong = f"the md5 is {found}, not {entry_of(name).md5}"
    if found == REPLACED_MD5.get(name):
        return f"{wrong}: these are the weights as published before July 2018, which were replaced"
    return wrong


def check_md5(file: IO[bytes], path: Path, name: str) -> None:
    """Raise WeightsError unless an open file has the md5 of the published weights ``name``; it is then at its start.

    All of it is read. Nothing is remembered of it: only a file that was read now is known to be right now. ``path``
    names it in messages.
    """
    found = _md5_of_open(file, path)
    if found != entry_of(name).md5:
        raise WeightsError(f"{printable(path)}: {mismatch(name, found)}; {_advice(path, name, found)}")
    file.seek(0)


def _advice(path: Path, name: str, found: str) -> str:
    advice = f"remove it and run zoo fetch {name}"
    if found == REPLACED_MD5.get(name):
        return f"{advice}, or load it as it is: zoo.get({name!r}, weights={str(path)!r})"
    return f"{advice}, or give its path as weights= if it is meant to differ"


def audit_cache(names: Sequence[str] = ()) -> list[Finding]:
    """Return what is to be said of each file in the cache, or of the published weights ``names`` alone.

    Raises ConfigError for an unknown name.
    """
    if names:
        return [_audit_named(entry_of(name).name) for name in names]
    folder = weights_dir()
    return [_audit(path) for path in sorted(folder.iterdir()) if _counts(path)] if folder.is_dir() else []


def _counts(path: Path) -> bool:
    """Return whether a file is more than a lock or a hidden file."""
    return not path.name.startswith(".") and not path.name.endswith(f"{SUFFIX}.lock")


def _audit_named(name: str) -> Finding:
    path = weights_path(name)
    part = path.with_name(f"{path.name}.part")
    return _audit(path) if path.exists() or not part.exists() else _audit(part)


def _audit(path: Path) -> Finding:
    name, _, rest = path.name.partition(SUFFIX)
    is_published = rest == "" and name in all_published()
    if rest.endswith(".part"):
        advice = f"zoo fetch {name} continues" if rest == ".part" else "left by a fetch that was stopped; remove it"
        return Finding(path, "partial", f"{path.lstat().st_size:,} bytes; {advice}")
    if not path.exists():
        return Finding(path, "missing", f"zoo fetch {name} downloads it")
    try:
        found = md5_of(path)
    except WeightsError as error:
        return Finding(path, "damaged" if is_published else "unknown", str(error))
    if is_published:
        if found == all_published()[name].md5:
            return Finding(path, "ok")
        return Finding(path, "damaged", f"{mismatch(name, found)}; {_advice(path, name, found)}")
    twin = next((known for known, entry in all_published().items() if entry.md5 == found), None)
    return Finding(path, "unknown", f"holds {twin}; rename it to {twin}{SUFFIX}" if twin else "not published weights")
