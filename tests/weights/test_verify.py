"""``zoo fetch`` downloads the published weights."""

from __future__ import annotations

import pytest

from tests.weights.conftest import NAME
from tests.weights.server import Server, fails
from zoo.cli import main
from zoo.weights.cache import weights_path


def test_fetch_prints_paths_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{weights_path(NAME)}\n"


def test_failed_download_exits_with_2(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.usual = fails(404)
    assert main(["fetch", NAME]) == 2
    assert f"zoo fetch: {NAME}: 404 Client Error: Not Found" in capsys.readouterr().err
