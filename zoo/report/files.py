"""Writing files so that a reader sees the old contents or the new, never a part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` as JSON; ValueError for NaN and infinities, which JSON does not have."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8; names of files that are not UTF-8 keep their bytes."""
    write_bytes(path, text.encode("utf-8", errors="surrogateescape"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, see `replacing`."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; at the end it is flushed to the disk and then renamed to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
