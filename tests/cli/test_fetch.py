"""``zoo fetch`` of several weights fetches all that it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.cli import main
from zoo.errors import WeightsError


def test_a_download_that_fails_does_not_keep_the_others_from_being_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str) -> Path:
        if name == "resnet34_ipabn-sync_lr_512":
            raise WeightsError("the server refuses")
        return Path("cache", name)

    monkeypatch.setattr("zoo.weights.fetch_weights", fetch)
    assert main(["fetch", "resnet34_ipabn-sync_lr_512", "resnet50_ipabn-sync_lr_512"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "cache/resnet50_ipabn-sync_lr_512\n"
    assert "the server refuses" in printed.err
    assert "1 of 2 files could not be fetched: resnet34_ipabn-sync_lr_512" in printed.err
    assert main(["fetch", "resnet34_ipabn-sync_lr_512"]) == 2
    assert capsys.readouterr().err == "zoo fetch: the server refuses\n"
