"""Published weights by name, in the cache or downloaded into it; their md5 is compared in either case."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from urllib.parse import quote

from zoo.errors import ConfigError, WeightsError, brief, printable
from zoo.files import cache_dir, is_offline, locked, open_own
from zoo.weights.download import Download, DownloadError, Sleep, without_password
from zoo.weights.published import REPLACED_MD5, SUFFIX, entry_of, published

logger = logging.getLogger("zoo")

DRIVE_URL = "https://drive.google.com/uc"
READ_BYTES = 2**20
Status = Literal["ok", "damaged", "partial", "unknown", "missing"]


def weights_dir() -> Path:
    """Return the folder of the cache that holds published weights; it need not exist."""
    return cache_dir() / "weights"


def weights_path(name: str) -> Path:
    """Return where the published weights ``name`` are, or will be once they are fetched and verified."""
    return weights_dir() / f"{name}{SUFFIX}"


def published_name(path_or_name: str | os.PathLike[str]) -> str | None:
    """Return the argument if it is the name of published weights, None if it is the path of a file.

    If the current folder has a file of that name, the argument is its path. Raises WeightsError for an argument of
    another type.
    """
    if not isinstance(path_or_name, (str, os.PathLike)):
        raise WeightsError(f"weights must be a path or the name of published weights, got {brief(repr(path_or_name))}")
    text = os.fspath(path_or_name)
    return text if text in published() and not Path(text).exists() else None


def fetch_weights(name: str, *, sleep: Sleep = time.sleep) -> Path:
    """Return the path of the verified file of the published weights ``name``, downloaded unless it is in the cache.

    For arguments, environment variables and errors see `open_published`.
    """
    with open_published(name, sleep=sleep):
        return weights_path(name)


def open_published(name: str, *, sleep: Sleep = time.sleep) -> IO[bytes]:
    """Return the verified file of the published weights ``name``, open at its start; it is downloaded if need be.

    The file was hashed once, through the descriptor that is returned: what is read from it is what was verified, even
    if another file takes its name in the meantime. A file in the cache is hashed by every call, because its
    content may have changed since the last call.

    $ZOO_WEIGHTS_URL is the address of a mirror that has the files as ADDRESS/NAME.pth.tar; with $ZOO_OFFLINE set to 1
    nothing is downloaded. A download that breaks off is resumed by the next call. ``sleep`` waits between tries.
    Raises ConfigError for an unknown name and WeightsError for weights that are not available or have the wrong md5;
    the cache then has no such file or the old one, never a part of the new one.
    """
    entry_of(name)
    path = weights_path(name)
    file = None if path.exists() else _download(name, path, sleep)
    if file is None:
        file = open_weights(path)
        try:
            check_md5(file, path, name)
        except WeightsError:
            file.close()
            raise
    return file


def _download(name: str, path: Path, sleep: Sleep) -> IO[bytes] | None:
    """Download the weights ``name`` to ``path`` and return the file, open and verified.

    Returns None if another process has put the file there in the meantime.
    """
    if is_offline():
        raise WeightsError(
            f"{name}: the weights are not in the cache and ZOO_OFFLINE is set; unset it, or {_by_hand(name, path)}"
        )
    url = _url_of(name)
    try:
        # Only its owner can read a cache folder that is made here. An existing folder keeps its permissions, so that a
        # group can share it.
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        weights_dir().mkdir(exist_ok=True)
        with locked(path.with_name(f"{path.name}.lock"), name) as is_alone:
            if path.exists():
                return None
            logger.info("%s: fetching %s (licence: %s)", name, without_password(url), entry_of(name).weights.licence)
            # Without a lock each process has a file of its own, which nobody else could resume.
            part = path.with_name(f"{path.name}.part" if is_alone else f"{path.name}.{secrets.token_hex(4)}.part")
            try:
                return _received(name, url, part, path, sleep)
            finally:
                if not is_alone:
                    part.unlink(missing_ok=True)
    except OSError as error:
        where = f"{printable(error.filename)}: " if error.filename else ""
        raise WeightsError(
            f"{name}: the weights cannot be written ({where}{error.strerror or error}); {printable(path.parent)}: make "
            f"it writable, with room, or set ZOO_CACHE to another folder; zoo fetch {name} continues with what there "
            "is already"
        ) from error


def _received(name: str, url: str, part: Path, path: Path, sleep: Sleep) -> IO[bytes]:
    """Download into ``part``, rename it to ``path`` once it is whole and has the right md5, and return it, open.

    A file that was put together from several answers and has the wrong md5 is downloaded once more.
    """
    expected = entry_of(name).md5
    download = Download(url, part, name, sleep)
    may_start_again = True
    try:
        while True:
            had_some = part.exists() and part.stat().st_size > 0  # left by a fetch that was stopped
            download.run(lambda received: md5_of(received) == expected)
            with ExitStack() as stack:
                file = stack.enter_context(open_own(part, "rb"))
                md5 = _digests_of_open(file, part, "md5")["md5"]
                if md5 == expected:
                    os.fsync(file.fileno())  # its bytes are safe on the disk before it gets the final name
                    part.replace(path)
                    file.seek(0)
                    stack.pop_all()  # it stays open
                    return file
            size = part.stat().st_size
            part.unlink()
            if not may_start_again or not (had_some or download.was_resumed):
                raise DownloadError(
                    f"{size:,} bytes were received, but {_mismatch(name, md5)}; {without_password(url)}"
                )
            logger.warning("%s: what was resumed has the wrong md5 (%s); starting again", name, md5)
            may_start_again = False
    except DownloadError as error:
        mirror = "check ZOO_WEIGHTS_URL" if os.environ.get("ZOO_WEIGHTS_URL") else "set ZOO_WEIGHTS_URL to a mirror"
        raise type(error)(
            f"{name}: {error}; try again later (zoo fetch {name}), {mirror}, or {_by_hand(name, path)}"
        ) from None


def _url_of(name: str) -> str:
    """Return the address of the published weights ``name``: the mirror's if one is set, otherwise Drive's."""
    mirror = os.environ.get("ZOO_WEIGHTS_URL", "").strip()
    if not mirror:
        return f"{DRIVE_URL}?export=download&id={entry_of(name).weights.drive_id}"
    if not re.match(r"https?://[^/]", mirror):
        raise ConfigError(f"ZOO_WEIGHTS_URL must be an address such as https://example.org/weights, got {mirror!r}")
    return f"{mirror.rstrip('/')}/{quote(name + SUFFIX)}"


def _by_hand(name: str, path: Path) -> str:
    """Return what a person with a browser can do if the download does not work."""
    return f"open {entry_of(name).page} in a browser and save the file (md5 {entry_of(name).md5}) as {printable(path)}"


def open_weights(path: str | os.PathLike[str]) -> IO[bytes]:
    """Return the file at ``path``, opened for reading; a link is followed.

    Raises WeightsError if it cannot be read or is no regular file, since reading from a pipe might never end.
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
    """Return the md5 of the file at ``path`` as 32 hexadecimal digits; raises WeightsError if it cannot be read."""
    with open_weights(path) as file:
        return _digests_of_open(file, path, "md5")["md5"]


def digests_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return "md5" and "sha256" of the file at ``path``, hexadecimal; raises WeightsError if it cannot be read."""
    with open_weights(path) as file:
        return _digests_of_open(file, path, "md5", "sha256")


def _digests_of_open(file: IO[bytes], path: str | os.PathLike[str], *kinds: str) -> dict[str, str]:
    """Return digests of an open file, which is then at its end, by their kinds; it is read once, in pieces."""
    digests = {kind: hashlib.new(kind, usedforsecurity=kind != "md5") for kind in kinds}
    try:
        while piece := file.read(READ_BYTES):
            for digest in digests.values():
                digest.update(piece)
    except OSError as error:
        raise WeightsError(f"{printable(path)}: cannot be read ({error.strerror}); check the disk") from None
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def check_md5(file: IO[bytes], path: Path, name: str) -> None:
    """Raise WeightsError unless an open file has the md5 of the published weights ``name``; it is then at its start.

    ``path`` names the file in messages.
    """
    md5 = _digests_of_open(file, path, "md5")["md5"]
    if md5 != entry_of(name).md5:
        raise WeightsError(f"{printable(path)}: {_mismatch(name, md5)}; {_advice(path, name, md5)}")
    file.seek(0)


def _mismatch(name: str, md5: str) -> str:
    """Return the words that tell that weights ``name`` have the wrong ``md5``, and which one they should have."""
    wrong = f"the md5 is {md5}, not {entry_of(name).md5}"
    if md5 == REPLACED_MD5.get(name):
        return f"{wrong}: these are the weights as published before July 2018, which were replaced"
    return wrong


def _advice(path: Path, name: str, md5: str) -> str:
    advice = f"remove it and run zoo fetch {name}"
    if md5 == REPLACED_MD5.get(name):
        return f"{advice}, or load it as it is: zoo.get({name!r}, weights={str(path)!r})"
    return f"{advice}, or give its path as weights= if it is meant to differ"


@dataclass(frozen=True)
class Finding:
    """The result of the check of one file; ``note`` gives the reason, or what to do, ``sha256`` is of a whole file."""

    path: Path
    status: Status
    note: str = ""
    sha256: str = ""


def audit_cache(names: Sequence[str] = ()) -> list[Finding]:
    """Check each file in the cache, or only the published weights ``names``, and return a finding for each.

    Raises ConfigError for an unknown name.
    """
    if names:
        return [_audit_named(entry_of(name).name) for name in names]
    folder = weights_dir()
    return [_audit(path) for path in sorted(folder.iterdir()) if _is_audited(path)] if folder.is_dir() else []


def _is_audited(path: Path) -> bool:
    """Return whether a file of the cache is checked: all but lock files and hidden files."""
    return not path.name.startswith(".") and not path.name.endswith(f"{SUFFIX}.lock")


def _audit_named(name: str) -> Finding:
    path = weights_path(name)
    part = path.with_name(f"{path.name}.part")
    return _audit(path) if path.exists() or not part.exists() else _audit(part)


def _audit(path: Path) -> Finding:
    name, _, rest = path.name.partition(SUFFIX)
    is_published = rest == "" and name in published()
    if rest.endswith(".part"):
        advice = f"zoo fetch {name} continues" if rest == ".part" else "left by a fetch that was stopped; remove it"
        return Finding(path, "partial", f"{path.lstat().st_size:,} bytes; {advice}")
    if not path.exists():
        return Finding(path, "missing", f"zoo fetch {name} downloads it")
    try:
        md5, sha256 = digests_of(path).values()
    except WeightsError as error:
        return Finding(path, "damaged" if is_published else "unknown", str(error))
    if is_published:
        if md5 == published()[name].md5:
            return Finding(path, "ok", sha256=sha256)
        return Finding(path, "damaged", f"{_mismatch(name, md5)}; {_advice(path, name, md5)}", sha256)
    twin = next((known for known, entry in published().items() if entry.md5 == md5), None)
    note = f"holds {twin}; rename it to {twin}{SUFFIX}" if twin else "not published weights"
    return Finding(path, "unknown", note, sha256)
