"""Published weights by name: from the cache, or downloaded into it; verified in either case."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from pathlib import Path
from urllib.parse import quote

from zoo.errors import ConfigError, WeightsError, brief, printable
from zoo.weights.cache import SUFFIX, make_weights_dir, open_own, weights_path
from zoo.weights.download import Download, DownloadError, Sleep, shown
from zoo.weights.drive import drive_url
from zoo.weights.lock import locked
from zoo.weights.published import all_published, entry_of
from zoo.weights.verify import check_md5, md5_of, mismatch, open_weights

logger = logging.getLogger("zoo")


def fetch_weights(name: str, *, sleep: Sleep = time.sleep) -> Path:
    """Return the verified file of the published weights ``name``, downloaded unless it is in the cache.

    $ZOO_WEIGHTS_URL is the address of a mirror that has the files as ADDRESS/NAME.pth.tar; with $ZOO_OFFLINE set to 1
    nothing is downloaded. A download that breaks off is resumed by the next call. ``sleep`` waits between tries.
    Raises ConfigError for an unknown name and WeightsError for weights that cannot be had or are not the right ones;
    the file in the cache is then missing or as it was, never a part.
    """
    if (path := weights_path(entry_of(name).name)).exists():
        with open_weights(path) as file:
            check_md5(file, path, name)
        return path
    return provide_weights(name, sleep=sleep)  # a download was verified


def provide_weights(name: str, *, sleep: Sleep = time.sleep) -> Path:
    """Return the file of the published weights ``name``, as `fetch_weights` does, without reading one in the cache.

    For whoever reads the file next, and verifies it then.
    """
    path = weights_path(entry_of(name).name)
    if path.exists():
        return path
    if is_offline():
        raise WeightsError(
            f"{name}: the weights are not in the cache and ZOO_OFFLINE is set; unset it, or {by_hand(name, path)}"
        )
    try:
        _fetch(name, path, sleep)
    except OSError as error:
        where = f"{printable(error.filename)}: " if error.filename else ""
        raise WeightsError(
            f"{name}: the weights cannot be written ({where}{error.strerror or error}); {printable(path.parent)}: make "
            f"it writable, with room, or set ZOO_CACHE to another folder; zoo fetch {name} continues with what there "
            "is already"
        ) from error
    return path


def published_name(path_or_name: str | os.PathLike[str]) -> str | None:
    """Return the name of published weights that is meant; None where it is the path of a file.

    Raises WeightsError for what can be neither.
    """
    if not isinstance(path_or_name, (str, os.PathLike)):
        raise WeightsError(f"weights must be a path or the name of published weights, got {brief(repr(path_or_name))}")
    text = os.fspath(path_or_name)
    return text if text in all_published() and not Path(text).exists() else None


def is_offline() -> bool:
    """Return whether $ZOO_OFFLINE forbids downloads."""
    return os.environ.get("ZOO_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


def by_hand(name: str, path: Path) -> str:
    """Return what a person can do who has a browser but no working download."""
    return f"open {entry_of(name).page} in a browser and save the file (md5 {entry_of(name).md5}) as {printable(path)}"


def url_of(name: str) -> str:
    """Return the address of the published weights ``name``: the mirror's where one is set, otherwise Drive's."""
    mirror = os.environ.get("ZOO_WEIGHTS_URL", "").strip()
    if not mirror:
        return drive_url(entry_of(name).weights.drive_id)
    if not re.match(r"https?://[^/]", mirror):
        raise ConfigError(f"ZOO_WEIGHTS_URL must be an address such as https://example.org/weights, got {mirror!r}")
    return f"{mirror.rstrip('/')}/{quote(name + SUFFIX)}"


def _fetch(name: str, path: Path, sleep: Sleep) -> None:
    """Download the file and give it its final name, unless another process did so in the meantime."""
    url = url_of(name)
    make_weights_dir()
    with locked(path.with_name(f"{path.name}.lock"), name) as is_alone:
        if path.exists():  # another process was faster
            return
        logger.info("%s: fetching %s (licence: %s)", name, shown(url), entry_of(name).weights.licence)
        # Without a lock each process has a file of its own, which nobody else could resume.
        part = path.with_name(f"{path.name}.part" if is_alone else f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            _download(name, url, part, path, sleep)
            _install(part, path)
        finally:
            if not is_alone:
                part.unlink(missing_ok=True)


def _download(name: str, url: str, part: Path, path: Path, sleep: Sleep) -> None:
    """Make ``part`` the whole and right file; one put together from several answers gets a second chance."""
    expected = entry_of(name).md5
    download = Download(url, part, name, sleep)
    try:
        for is_last in (False, True):
            had_some = part.exists() and part.stat().st_size > 0  # of a fetch that was stopped
            download.run(lambda file: md5_of(file) == expected)
            found = md5_of(part)
            if found == expected:
                return
            size = part.stat().st_size
            part.unlink()
            if is_last or not (had_some or download.was_resumed):
                raise DownloadError(f"{size:,} bytes were received, but {mismatch(name, found)}; {shown(url)}")
            logger.warning("%s: what was resumed has the wrong md5 (%s); starting again", name, found)
    except DownloadError as error:
        mirror = "check ZOO_WEIGHTS_URL" if os.environ.get("ZOO_WEIGHTS_URL") else "set ZOO_WEIGHTS_URL to a mirror"
        raise type(error)(
            f"{name}: {error}; try again later (zoo fetch {name}), {mirror}, or {by_hand(name, path)}"
        ) from None


def _install(part: Path, path: Path) -> None:
    """Rename the verified file, its bytes safe on the disk before."""
    with open_own(part, "r+b") as file:
        os.fsync(file.fileno())
    part.replace(path)
