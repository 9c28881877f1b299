"""Where zoo keeps what it unpacks and downloads, and the record of the digests of the files there."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from zoo.weights.read import md5_of

SUFFIX = ".pth.tar"


def cache_dir() -> Path:
    """Return $ZOO_CACHE, or ~/.cache/zoo when it is not set; the folder need not exist."""
    return Path(os.environ.get("ZOO_CACHE") or Path.home() / ".cache" / "zoo")


def weights_dir() -> Path:
    """Return the folder of the cache that holds published weights; it need not exist."""
    return cache_dir() / "weights"


def weights_path(name: str) -> Path:
    """Return where the published weights ``name`` are, or will be once they are fetched and verified."""
    return weights_dir() / f"{name}{SUFFIX}"


def sidecar_of(path: Path) -> Path:
    """Return the file beside ``path`` that records its size, time of change and md5."""
    return path.with_name(f"{path.name}.json")


def cached_md5(path: Path) -> str:
    """Return the md5 of the file at ``path``, from its sidecar where size and time of change are still the same.

    Otherwise the file is read, and the sidecar written for the next time. Raises WeightsError if it cannot be read.
    """
    with suppress(OSError):
        recorded = _recorded(path)
        if recorded is not None and recorded.items() >= _identity(path).items():
            return str(recorded["md5"])
    return fresh_md5(path)


def fresh_md5(path: Path) -> str:
    """Return the md5 of the file at ``path``, which is read whatever its sidecar says; writes the sidecar.

    Raises WeightsError if the file cannot be read.
    """
    # Taken before reading: a file that changes meanwhile does not fit its record, and is read again next time.
    identity = _identity(path) if path.is_file() else {}
    md5 = md5_of(path)
    with suppress(OSError):  # of a cache that may only be read: it is slower there, but not wrong
        _write(sidecar_of(path), {**identity, "md5": md5})
    return md5


def _identity(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _recorded(path: Path) -> dict[str, Any] | None:
    """Return the contents of the sidecar; None where there is none or it is damaged."""
    try:
        content = json.loads(sidecar_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("md5"), str) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader sees the old contents or the new, never a part; no matter how many write at once."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
