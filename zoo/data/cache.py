"""Where zoo keeps what it unpacks and downloads."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $ZOO_CACHE, or ~/.cache/zoo when it is not set; the folder need not exist."""
    return Path(os.environ.get("ZOO_CACHE") or Path.home() / ".cache" / "zoo")
