"""An empty cache, a local server, and published weights of 300 kB."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import _package_and_hub, hub
from tests.weights.server import Server
from zoo.config.published import Digest, published
from zoo.weights import _cache as weights_cache

__all__ = ["_package_and_hub", "hub"]

NAME = "resnet34_ipabn-sync_lr_512"
CONTENT = b"PK\x03\x04" + random.Random(0).randbytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the weights in an empty cache; NAME is registered with the md5 of CONTENT."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    monkeypatch.setattr(published()[NAME], "digest", Digest("md5", MD5))
    monkeypatch.setattr(weights_cache, "TIMEOUT_S", (0.8, 0.8))
    monkeypatch.setattr(weights_cache, "RETRIES", 1)
    return tmp_path / "cache" / "weights"


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of CONTENT, set as the mirror."""
    with Server(CONTENT) as server:
        monkeypatch.setenv("ZOO_WEIGHTS_URL", server.url)
        yield server
