"""What the owners of data sets distribute: archives that are checked and then read, and the folder made of them."""

from __future__ import annotations

import hashlib
import logging
import lzma
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.data.cached_folder import remove_leftovers
from zoo.data.reading import open_regular
from zoo.errors import DataError, printable

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20
MAX_MEMBER_BYTES = 1 << 28  # the largest file of those that are read has 150 MB


def check_md5(file: Path, expected: str) -> None:
    """Raise DataError unless ``file`` can be read and has the md5 ``expected``; the file is read in pieces."""
    logger.info("checking the md5 of %s", printable(file))
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            while piece := opened.read(READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise DataError(
            f"a file cannot be read: {error.strerror}; {printable(file)}: make it readable, or download it again"
        ) from error
    if digest.hexdigest() != expected:
        raise DataError(
            f"the file is not the one that the owners of the data distribute: its md5 is {digest.hexdigest()} and not "
            f"{expected}; {printable(file)}: download it again"
        )


def read_members(archive: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of those files in a tar archive whose names are wanted, in the archive's order.

    Nothing is unpacked: where a name, a link or a device in the archive would lead to does not matter. Raises DataError
    for an archive that is damaged, and for a wanted file of more than `MAX_MEMBER_BYTES`.
    """
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                if not (member.isreg() and is_wanted(member.name)):
                    continue
                if member.size > MAX_MEMBER_BYTES:
                    raise DataError(
                        f"{printable(member.name)} in {printable(archive)} has {member.size:,} bytes, more than the "
                        f"{MAX_MEMBER_BYTES:,} that are read: download it again"
                    )
                content = tar.extractfile(member)
                assert content is not None, "a regular file has a content"
                yield member.name, content.read()
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"the archive cannot be read: {error}; {printable(archive)}: download it again") from error


def read_all(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the files ``names`` of a tar archive; DataError where one is missing."""
    found = dict(read_members(archive, lambda name: name in names))
    if missing := [name for name in names if name not in found]:
        raise DataError(f"the archive has no {missing[0]}; {printable(archive)}: download it again")
    return found


def check_free(target: Path) -> None:
    """Raise DataError if there is something at ``target`` already, other than an empty folder."""
    try:
        is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    except OSError as error:
        raise DataError(f"OUT cannot be looked at: {error.strerror}; {printable(target)}: give another") from error
    if not is_free:
        raise DataError(f"there is something already, which is not overwritten; {printable(target)}: give another OUT")


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target``, which becomes ``target`` when the block has filled it.

    If the block raises, nothing is left behind; the folder of a killed process is removed by the next one that begins
    an hour later or more. Raises DataError where `check_free` does, and if the files cannot be written.
    """
    check_free(target)
    target = target.resolve()  # "." has no name, and a link is not replaced
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(unfinished)
        with tempfile.TemporaryDirectory(prefix=f".{unfinished.name}-", dir=target.parent) as temporary:
            built = Path(temporary, target.name)
            built.mkdir()
            yield built
            built.rename(target)
    except OSError as error:
        raise DataError(
            f"the images cannot be written: {error.strerror}; {printable(target)}: make room, or give another OUT"
        ) from error
