"""Versions of installed packages, and a digest of the sources of this one; without torch, so that it loads fast."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

SHOWN_DIGITS = 12


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """Return the first digits of the sha256 of the Python sources of this package, names and contents."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:SHOWN_DIGITS]
