"""Reading the published archives of data sets: verified by md5, without unpacking them."""

from __future__ import annotations

import hashlib
import logging
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from zoo.errors import DataError, escape
from zoo.files import open_regular

logger = logging.getLogger(__name__)

DOWNLOAD_AGAIN = "download it again"
READ_BYTES = 1 << 20
MAX_MEMBER_BYTES = 1 << 28  # the largest member that is read has 150 MB


def check_md5(file: Path, expected: str) -> None:
    """Raise DataError unless ``file`` can be read and has the md5 ``expected``."""
    logger.info("checking the md5 of %s", escape(file))
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            while piece := opened.read(READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", file, DOWNLOAD_AGAIN) from error
    if digest.hexdigest() != expected:
        what = f"the file is not the original: its md5 is {digest.hexdigest()}, not {expected}"
        raise DataError(what, file, DOWNLOAD_AGAIN)


def read_members(archive: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each regular file of a tar archive whose name is wanted, in the archive's order.

    Nothing is unpacked, so names, links and devices in the archive are harmless. Raises DataError for a damaged archive
    and for a wanted file of more than `MAX_MEMBER_BYTES`.
    """
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                if not (member.isreg() and is_wanted(member.name)):
                    continue
                if member.size > MAX_MEMBER_BYTES:
                    what = f"{member.name} has {member.size:,} bytes, more than {MAX_MEMBER_BYTES:,}"
                    raise DataError(what, archive, DOWNLOAD_AGAIN)
                content = tar.extractfile(member)
                assert content is not None, "a regular file has a content"
                yield member.name, content.read()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"the archive cannot be read: {error}", archive, DOWNLOAD_AGAIN) from error


def read_all(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the files ``names`` of a tar archive; DataError if one is missing."""
    found = dict(read_members(archive, lambda name: name in names))
    if missing := [name for name in names if name not in found]:
        raise DataError(f"the archive does not contain {missing[0]}", archive, DOWNLOAD_AGAIN)
    return found
