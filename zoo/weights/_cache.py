"""The cache of published weights: downloads files, and verifies them whenever they are opened."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
from pathlib import Path
from typing import IO
from urllib.parse import quote

from tqdm import tqdm

from zoo.config.published import WEIGHTS_SUFFIX, Digest, entry_of, published
from zoo.errors import ConfigError, WeightsError, connection_reason, escape, hide_secrets
from zoo.files import cache_dir, file_lock, is_offline, open_regular

logger = logging.getLogger("zoo")

DRIVE_URL = "https://drive.google.com/uc"
READ_BYTES = 2**20
TIMEOUT_S = 10.0, 30.0  # connection timeout, and timeout between two packets
RETRIES = 4
MAX_FILE_BYTES = 2**32  # the largest published file has 0.57 GB (142 million parameters)


def weights_path(name: str) -> Path:
    """Return the path of the published weights ``name`` in the cache; the file need not exist."""
    return cache_dir() / "weights" / f"{name}{WEIGHTS_SUFFIX}"


def published_name(path_or_name: str | os.PathLike[str]) -> str | None:
    """Return the argument if it names published weights and is not the path of a file; otherwise None."""
    text = os.fspath(path_or_name)
    return text if text in published() and not Path(text).exists() else None


def fetch_weights(name: str) -> Path:
    """Download the published weights ``name`` if necessary; return the path of the verified file."""
    with open_published(name):
        return weights_path(name)


def open_published(name: str) -> IO[bytes]:
    """Return the published weights ``name`` as an open, verified file; download them if necessary.

    Computes the digest through the returned file object, so that the verified bytes are the bytes that are read.
    $ZOO_WEIGHTS_URL is the address of a mirror with files ADDRESS/NAME.pth.tar; $ZOO_OFFLINE=1 forbids downloads.

    Raises ConfigError for an unknown name, and WeightsError for weights that are unavailable or have a wrong digest.
    """
    entry_of(name)
    path = weights_path(name)
    if not path.exists():
        _fetch(name, path)
    file = open_weights(path)
    try:
        if fault := _fault_of(file, path, entry_of(name).digest):
            remedy = f"remove it and run zoo fetch {name}, or pass its path as weights= if it is meant to differ"
            raise WeightsError(fault, path, remedy)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _fetch(name: str, path: Path) -> None:
    """Download the weights ``name`` to ``path``, unless another process does so first."""
    if is_offline():
        raise WeightsError(
            f"{name}: the weights are not in the cache and ZOO_OFFLINE is set; unset it, or {_by_hand(name, path)}"
        )
    url = _url_of(name)
    try:
        # A new cache is private to its owner. The permissions of an existing folder do not change, so a group can share
        # it.
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        with file_lock(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                logger.info("%s: downloading %s (%s)", name, hide_secrets(url), entry_of(name).weights.license)
                _download_verified(name, url, path)
    except OSError as error:
        what = f"{name}: the weights cannot be written ({error.strerror or error})"
        remedy = f"free space or set ZOO_CACHE to another folder, then zoo fetch {name}"
        raise WeightsError(what, error.filename or path.parent, remedy) from error


def _download_verified(name: str, url: str, path: Path) -> None:
    """Download into a folder beside ``path``, and move the file to ``path`` if its digest matches."""
    folder = path.with_name(f"{path.name}.part")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    folder.mkdir()
    try:
        unverified = folder / path.name
        reason = _download(name, url, unverified)
        if not reason:
            with open_weights(unverified) as file:
                if fault := _fault_of(file, unverified, entry_of(name).digest):
                    reason = f"{unverified.stat().st_size:,} bytes were received, but {fault}"
        if reason:
            mirror = "check ZOO_WEIGHTS_URL" if os.environ.get("ZOO_WEIGHTS_URL") else "set ZOO_WEIGHTS_URL to a mirror"
            remedy = f"try again later (zoo fetch {name}), {mirror}, or {_by_hand(name, path)}"
            raise WeightsError(f"{name}: {reason}; {remedy}")
        unverified.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(name: str, url: str, file: Path) -> str:
    """Download ``url`` to ``file`` with a progress bar; return the reason of a failure, or "" on success.

    The package gdown retries, and answers Google Drive's confirmation form for large files.
    """
    import gdown  # imported late: takes a third of a second
    import requests
    import urllib3

    def advance(num_bytes: int, total: int | None) -> None:
        if num_bytes > MAX_FILE_BYTES:
            raise gdown.exceptions.DownloadError(f"the server sends more than {MAX_FILE_BYTES:,} bytes")
        bar.total = total
        bar.update(num_bytes - bar.n)

    try:
        with tqdm(desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            gdown.download(
                url, str(file), quiet=True, use_cookies=False, timeout=TIMEOUT_S, retries=RETRIES, progress=advance
            )
        return ""
    except (
        *(gdown.exceptions.DownloadError, requests.RequestException),
        *(urllib3.exceptions.HTTPError, ValueError),  # malformed answers
    ) as error:
        if isinstance(error, gdown.exceptions.DownloadError) and isinstance(error.__cause__, requests.ConnectionError):
            error = error.__cause__  # gdown only quotes the cause
        return connection_reason(error)


def _url_of(name: str) -> str:
    """Return the address of the published weights ``name``: on the mirror if one is set, otherwise the authors'."""
    mirror = os.environ.get("ZOO_WEIGHTS_URL", "").strip()
    if not mirror:
        weights = entry_of(name).weights
        return weights.url or f"{DRIVE_URL}?id={weights.drive_id}"
    if not re.match(r"https?://[^/]", mirror):
        got = hide_secrets(repr(mirror))
        raise ConfigError(f"ZOO_WEIGHTS_URL must be an address such as https://example.org/weights, got {got}")
    folder, mark, query = mirror.partition("?")  # a signed address has a query
    return f"{folder.rstrip('/')}/{quote(name + WEIGHTS_SUFFIX)}{mark}{query}"


def _by_hand(name: str, path: Path) -> str:
    """Return instructions for downloading the weights with a browser."""
    return f"open {entry_of(name).page} in a browser and save the file ({entry_of(name).digest}) as {escape(path)}"


def _fault_of(file: IO[bytes], path: Path, expected: Digest) -> str:
    """Describe how the digest of an open file differs from the expected one; "" if it does not."""
    digits = _digests_of_open(file, path, expected.kind)[expected.kind]
    return "" if digits == expected.digits else f"the {expected.kind} is {digits}, not {expected.digits}"


def open_weights(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open the file at ``path`` for reading. Raises WeightsError if it cannot be read."""
    try:
        return io.BufferedReader(open_regular(path))
    except (OSError, ValueError) as error:  # a null byte in the name raises ValueError
        raise _unreadable(path, error) from None


def md5_of(path: str | os.PathLike[str]) -> str:
    """Return the MD5 of the file at ``path`` as 32 hexadecimal digits. Raises WeightsError if it cannot be read."""
    with open_weights(path) as file:
        return _digests_of_open(file, path, "md5")["md5"]


def digests_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return "md5" and "sha256" of the file at ``path``, hexadecimal. Raises WeightsError if it cannot be read."""
    with open_weights(path) as file:
        return _digests_of_open(file, path, "md5", "sha256")


def _digests_of_open(file: IO[bytes], path: str | os.PathLike[str], *kinds: str) -> dict[str, str]:
    """Read an open file to its end; return its digests by kind."""
    digests = {kind: hashlib.new(kind, usedforsecurity=kind != "md5") for kind in kinds}
    try:
        while piece := file.read(READ_BYTES):
            for digest in digests.values():
                digest.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from None
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def _unreadable(path: str | os.PathLike[str], error: Exception) -> WeightsError:
    reason = getattr(error, "strerror", None) or error
    return WeightsError(f"the file cannot be read ({reason})", path, "pass the path of a weights file")
