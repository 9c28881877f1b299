"""``zoo list`` and ``zoo show`` describe the networks, and ``zoo doctor`` the machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import zoo
from tests.refusals import refused
from zoo.cli import main
from zoo.config.parse import load_experiment, parse_experiment


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def _table(out: str) -> list[list[str]]:
    """Return the cells of a printed table: the headers, then a list per row."""
    headers, _, *rows = (_cells(line) for line in out.splitlines() if line.startswith("|"))
    return [headers, *rows]


def test_table_has_sizes_of_networks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "resnext101*"]) == 0
    headers, *rows = _table(capsys.readouterr().out)
    assert headers == ["name", "parameters, M", "norms", "channels of the stages"]
    assert ["resnext101", "42.84", "100", "64 256 512 1024 2048"] in rows
    assert len(rows) == 4


def test_table_of_published_weights_has_scores_that_one_of_them_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--pretrained", "resnext101*"]) == 0
    headers, *rows = _table(capsys.readouterr().out)
    assert headers == ["name", "parameters, M", "224", "224, ten crops", "320"]
    assert ["resnext101_ipabn_lr_512", "42.90", "78.08", "79.52", "79.38"] in rows


@pytest.mark.parametrize("options", [[], ["--pretrained"], ["vit"]], ids=" ".join)
def test_table_fits_terminal_of_120_columns(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *options]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    headers, *rows = _table(out)
    assert all(any(column) for column in zip(*rows, strict=True)), headers


def test_published_network_is_shown_with_origin_and_license(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "resnext101_ipabn_lr_512"]) == 0
    out = capsys.readouterr().out
    for fact in ("42,902,312", "three 3x3", "3b7a221cbc076410eb12c8dd361b7e4e", "ImageNet terms", "79.52", "mod5"):
        assert fact in out


def test_weights_without_recipe_are_shown_and_not_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "revbifpn_s3_imagenet", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["published"]
    assert (shown["batch"], len(shown["sha256"]), shown["license"]) == (None, 64, "BSD-3-Clause")
    assert "drive_id" not in shown
    assert main(["list", "--pretrained", "revbifpn_s3*"]) == 0
    headers, row = _table(capsys.readouterr().out)
    assert (headers[2:], row[0], row[2:]) == (["288"], "revbifpn_s3_imagenet", ["81.10"])
    assert main(["train", "revbifpn_s3_imagenet", str(tmp_path), "--log-dir", str(tmp_path), "--epochs", "1"]) == 2
    assert "optimizer: the published weights of revbifpn_s3" in capsys.readouterr().err
    train = partial(zoo.train, "revbifpn_s3", tmp_path, experiment="revbifpn_s3_imagenet", log_dir=tmp_path)
    refused(zoo.ConfigError, train, "optimizer: the published weights of revbifpn_s3")


def test_doctor_names_versions_kernels_and_folders(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", "/proc/no-such-folder")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for fact in (torch.__version__, "reference", "/proc/no-such-folder (ZOO_CACHE", "4 cores, 1 thread used by torch"):
        assert fact in out


def test_network_is_shown_as_json_with_its_options_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "resnext101_ipabn_lr_512", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["parameters"], shown["published"]["network"]["norm"]) == (42_902_312, "inplace")
    assert shown["stages"][-1] == {"num_chs": 2048, "reduction": 32, "module": "mod5"}
    assert "three 3x3 convolutions" in shown["options"]["input_3x3"]
    assert "checkpoint" in shown["options"]["memory"]


@pytest.mark.parametrize("name", ["cifar10_resnet18_ipabn", "resnext101_ipabn_lr_512.json"])
def test_shown_experiment_can_be_parsed_again(capsys: pytest.CaptureFixture[str], name: str) -> None:
    bundled = load_experiment(name)
    assert main(["show", name, "--json"]) == 0
    assert parse_experiment(json.loads(capsys.readouterr().out), "shown") == bundled
    assert main(["show", name]) == 0
    assert parse_experiment(json.loads(capsys.readouterr().out), "shown") == bundled


@pytest.mark.parametrize(("command", "code"), [(["list", "resnet18"], 0), (["list", "mobilenet"], 2)])
def test_networks_of_other_packages_are_mentioned(
    command: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == code
    printed = "".join(capsys.readouterr())
    assert "torchvision:NAME and timm:NAME" in printed


def test_name_of_network_and_experiment_is_suggested_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "resnet50_ipabn-sync_lr_51"]) == 2
    assert capsys.readouterr().err.count("resnet50_ipabn-sync_lr_512") == 1
