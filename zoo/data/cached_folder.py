"""Folders of images that are made on first use and kept in the cache, complete or not there at all."""

from __future__ import annotations

import filecmp
import glob
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zoo.data._download_for_remote import LockedElsewhereError, locked
from zoo.errors import DataError
from zoo.files import cache_dir

LOCK = "lock"  # in a temporary folder: held by the process that makes it, so that a wrong clock costs nobody his folder
MARKER = "contents.sha256"
STALE_S = 3600.0  # making a folder takes seconds


def cached_folder(name: str, build: Callable[[Path], None], made_of: bytes, cache: Path | None = None) -> Path:
    """Return the folder ``name`` of the cache, made by ``build(folder)`` unless it is there and as it should be.

    ``made_of`` is anything that changes with what ``build`` makes. ``cache`` is `zoo.files.cache_dir` when not given.
    The folder appears complete or not at all. An outdated or damaged one is mended file by file, so that several
    processes may do this at the same time. Temporary folders of killed processes are removed an hour later. Raises
    DataError when the folder cannot be written.
    """
    tree = (cache or cache_dir()) / name
    remove_leftovers(tree)
    if not is_intact(tree, made_of):
        try:
            _install(tree, build, made_of)
        except OSError as error:
            raise DataError(
                f"the bundled images cannot be unpacked: {error}; {tree}: make room there or remove it, or set "
                "ZOO_CACHE to another folder"
            ) from error
    return tree


def is_intact(tree: Path, made_of: bytes) -> bool:
    """Return whether ``tree`` is as it was when it was made of ``made_of``."""
    try:
        return (tree / MARKER).read_text() == _contents(tree, made_of)
    except (OSError, UnicodeDecodeError):
        return False


def remove_leftovers(tree: Path) -> None:
    """Remove the temporary folders of killed processes beside ``tree``; a young one may belong to a running process."""
    for folder in tree.parent.glob(f".{glob.escape(tree.name)}-{'?' * 8}"):  # as tempfile names them
        with suppress(OSError, LockedElsewhereError):  # OSError: another process removes it, too
            if time.time() - folder.stat().st_mtime > STALE_S:
                with locked(folder / LOCK):
                    shutil.rmtree(folder)


def _install(tree: Path, build: Callable[[Path], None], made_of: bytes) -> None:
    tree.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{tree.name}-", dir=tree.parent) as temporary,
        locked(Path(temporary, LOCK)),
    ):
        built = Path(temporary, tree.name)
        build(built)
        # The marker is written last. No file is flushed to the disk, as files that a power cut damages no longer fit
        # it.
        (built / MARKER).write_text(_contents(built, made_of))
        try:
            built.rename(tree)
        except OSError:  # there is one already: damaged, or another process was faster
            _overwrite(tree, built)


def _overwrite(tree: Path, built: Path) -> None:
    """Make ``tree`` equal to ``built`` without a moment in which one of its good files is missing."""
    wanted = {path.relative_to(built) for path in built.rglob("*")}
    for name in sorted(wanted):  # a folder comes before what is in it
        if (built / name).is_dir():
            (tree / name).mkdir(parents=True, exist_ok=True)
        elif not (tree / name).is_file() or not filecmp.cmp(built / name, tree / name, shallow=False):
            os.replace(built / name, tree / name)
    for folder, subfolders, files in os.walk(tree, topdown=False):  # a folder comes after what is in it
        for path in (Path(folder, name) for name in (*files, *subfolders)):
            if path.relative_to(tree) not in wanted:
                with suppress(FileNotFoundError):  # another process does the same
                    path.rmdir() if path.is_dir() else path.unlink()


def _contents(tree: Path, made_of: bytes) -> str:
    """Return the digest of ``made_of`` and of the names and bytes of all files and folders but the marker."""
    digest = hashlib.sha256(made_of)
    for folder, subfolders, files in os.walk(tree):
        subfolders.sort()
        digest.update(f"{Path(folder).relative_to(tree).as_posix()}\n".encode())
        for name in sorted(files):
            path = Path(folder, name)
            if path != tree / MARKER:
                digest.update(f"{name}\n".encode())
                digest.update(path.read_bytes() if path.is_file() else b"")  # a pipe would keep the reader waiting
    return digest.hexdigest() + "\n"
