"""Where published weights are kept once they are downloaded."""

from __future__ import annotations

from pathlib import Path

from zoo.files import cache_dir

SUFFIX = ".pth.tar"


def weights_dir() -> Path:
    """Return the folder of the cache that holds published weights; it need not exist."""
    return cache_dir() / "weights"


def weights_path(name: str) -> Path:
    """Return where the published weights ``name`` are, or will be once they are fetched and verified."""
    return weights_dir() / f"{name}{SUFFIX}"


def make_weights_dir() -> None:
    """Make the folder of published weights where it is missing.

    A cache that this makes is its owner's alone (mode 0700). One that was there before keeps the rights that somebody
    gave it, so that a group can share it.
    """
    cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    weights_dir().mkdir(exist_ok=True)
