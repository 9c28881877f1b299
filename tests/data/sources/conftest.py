"""The shards on a web server and in the memory of fsspec, with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.weights.server import Server
from zoo.data.sources import remote


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the shards in the cache. Requests are allowed, and retries do not wait."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    monkeypatch.setattr(remote, "TIMEOUTS_S", (1.0, 0.3))
    monkeypatch.setattr("zoo.files.sleep", lambda seconds: None)
    return tmp_path / "cache" / "shards"


@pytest.fixture
def server(originals: Path, cache: Path) -> Iterator[Server]:
    with Server(originals / "shards") as server:
        yield server


@pytest.fixture
def memory(originals: Path, cache: Path) -> Iterator[str]:
    """The address of the shards in memory."""
    system = fsspec.filesystem("memory")
    for path in (originals / "shards").glob("**/*.*"):
        system.pipe_file(f"/bucket/shards/{path.relative_to(originals / 'shards')}", path.read_bytes())
    yield "memory://bucket/shards"
    system.store.clear()
