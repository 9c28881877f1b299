"""Output folders of commands and of the cache. They are renamed into place when they are complete."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.errors import DataError
from zoo.files import cache_dir

DIGEST_CHARS = 12


def cached_folder(name: str, build: Callable[[Path], None], made_of: bytes) -> Path:
    """Return the folder NAME-DIGEST in `zoo.files.cache_dir`; create it with ``build(folder)`` if it does not exist.

    Builds the folder under a temporary name and renames it, so that several processes may build it at once. Raises
    DataError if it cannot be written.

    Args:
    - `name`: NAME.
    - `build`: (folder) -> None, creates the folder.
    - `made_of`: the inputs of ``build``; DIGEST is their sha256.
    """
    cache = cache_dir()
    tree = cache / f"{name}-{hashlib.sha256(made_of).hexdigest()[:DIGEST_CHARS]}"
    try:
        if tree.is_dir():
            return tree
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as temporary:
            built = Path(temporary, name)
            build(built)
            try:
                built.rename(tree)
            except OSError:
                if not tree.is_dir():  # otherwise another process was faster
                    raise
    except OSError as error:
        remedy = "free disk space, or set ZOO_CACHE to another folder"
        raise DataError(f"the bundled images cannot be unpacked: {error}", tree, remedy) from error
    return tree


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Creates a folder TARGET.unfinished, yields it, and renames it to ``target`` when the block ends.

    If the block raises, removes the folder; a killed process leaves it behind. Raises DataError if ``target`` exists
    and is not an empty folder, and if files cannot be written.
    """
    target = target.resolve()  # "." has no name; a link must not be replaced
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise DataError("OUT exists and is not overwritten", target, "choose another OUT")
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    except OSError as error:
        remedy = "remove what a killed run left, free disk space, or choose another OUT"
        raise DataError(f"the images cannot be written: {error.strerror}", error.filename or target, remedy) from error
