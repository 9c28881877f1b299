"""Small archives, as data sets are distributed in."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_tar(path: Path, files: Mapping[str, bytes], mode: str = "w:gz") -> str:
    """Write an archive of ``files``; return its md5."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()
