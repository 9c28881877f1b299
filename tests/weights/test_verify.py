"""``zoo fetch`` lists and fetches the published weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.weights.conftest import CONTENT, MD5, NAME
from tests.weights.server import Server, fails
from zoo.cli import main
from zoo.config.published import published
from zoo.weights.cache import weights_path

OTHER = "resnet50_ipabn-sync_lr_512"


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
    assert f"zoo fetch: {NAME}: the server answered 404 Not Found" in capsys.readouterr().err


def test_a_download_that_fails_does_not_keep_the_others_from_being_fetched(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published()[OTHER], "md5", MD5)
    server.script = [fails(404)]
    assert main(["fetch", NAME, OTHER]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"{weights_path(OTHER)}\n"
    assert f"{NAME}: the server answered 404 Not Found" in printed.err
    assert f"1 of 2 files were not fetched: {NAME}; run the same command again" in printed.err
