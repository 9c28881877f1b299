"""``zoo fetch`` lists and fetches the published weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import Server, fails
from zoo.cli import main
from zoo.weights.cache import weights_path


def put(cache: Path, **files: bytes) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (cache / name).write_bytes(content)


def test_fetch_prints_where_the_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{weights_path(NAME)}\n"


def test_fetch_without_names_lists_all_and_downloads_nothing(
    server: Server, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cache, **{f"{NAME}.pth.tar": CONTENT})
    assert main(["fetch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 10 + 1
    yes = [line for line in lines if "| yes " in line]
    assert len(yes) == 1
    assert all(word in yes[0] for word in (NAME, "0.30", MD5, "ImageNet terms of access"))
    assert server.requests == []


def test_a_download_that_fails_exits_with_2(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.usual = fails(404)
    assert main(["fetch", NAME]) == 2
    assert f"zoo fetch: {NAME}: 404 Client Error: Not Found" in capsys.readouterr().err
