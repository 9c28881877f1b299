"""``zoo list`` and ``zoo show`` tell what the networks are, and ``zoo doctor`` what the machine is."""

from __future__ import annotations

import json

import pytest
import torch

from zoo.cli import main


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_table_has_sizes_and_published_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "resnext101*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {_cells(line)[0]: _cells(line) for line in lines if line.startswith("| resnext101")}
    assert rows["resnext101"] == ["resnext101", "42.84", "100", "64 256 512 1024 2048", "", "", ""]
    assert rows["resnext101_ipabn_lr_512"][4:] == ["78.08 / 93.79", "79.52 / 94.66", "79.38 / 94.67"]
    assert len(rows) == 4


def test_only_published_networks_on_demand_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "dense*", "--pretrained", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["name"], entry["arch"]) == ("densenet264_ipabn_lr_256", "densenet264")
    assert (entry["parameters"], entry["parameters_headless"]) == (33_403_880, 30_714_880)
    assert entry["scores"]["tencrop224"] == {"top1": 79.72, "top5": 94.93}


def test_a_pattern_without_match_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "resnet19"]) == 2
    assert "resnet18" in capsys.readouterr().err


def test_a_published_network_is_shown_with_origin_and_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "resnext101_ipabn_lr_512"]) == 0
    out = capsys.readouterr().out
    for fact in ("42,902,312", "three 3x3", "3b7a221cbc076410eb12c8dd361b7e4e", "ImageNet terms", "79.52", "mod5"):
        assert fact in out


def test_an_architecture_is_shown_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "resnet18"]) == 0
    out = capsys.readouterr().out
    assert "dilation" in out
    assert "11,176,512" in out
    assert "md5" not in out


def test_an_unknown_network_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "resnet19"]) == 2
    assert "resnet18" in capsys.readouterr().err


def test_doctor_names_versions_kernels_and_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("ZOO_CACHE", "/proc/no-such-folder")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "reference" in out
    assert "/proc/no-such-folder (not writable" in out
    monkeypatch.setenv("ZOO_CACHE", f"{tmp_path}/new/cache")
    main(["doctor"])
    assert f"{tmp_path}/new/cache (writable" in capsys.readouterr().out
