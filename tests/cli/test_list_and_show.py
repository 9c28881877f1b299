"""``zoo list``, ``zoo show``, ``zoo settings`` and ``zoo doctor`` print facts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Cli, Run
from zoo.cli.show import INDENT
from zoo.config.parse import load_experiment, parse_experiment
from zoo.engine._digest import digest, state_tensors
from zoo.weights import md5_of, read_checkpoint, read_weights


@pytest.mark.parametrize(
    ("options", "expected", "row", "num_rows"),
    [
        (
            ["resnext101*"],
            ["name", "parameters, M", "norms", "channels of the stages"],
            ["resnext101", "42.84", "100", "64 256 512 1024 2048"],
            4,
        ),
        (
            ["--pretrained", "resnext101*"],
            ["name", "parameters, M", "224", "224, ten crops", "320"],
            ["resnext101_ipabn_lr_512", "42.90", "78.08", "79.52", "79.38"],
            3,
        ),
        (
            ["--pretrained", "revbifpn_s3*"],
            ["name", "parameters, M", "288"],
            ["revbifpn_s3_imagenet", "19.57", "81.10"],
            1,
        ),
    ],
    ids=["sizes", "scores", "without recipe"],
)
def test_table_has_columns_that_one_network_fills(
    options: list[str], expected: list[str], row: list[str], num_rows: int, cli: Cli
) -> None:
    headers, *rows = cli("list", *options).rows
    assert headers == expected
    assert row in rows
    assert len(rows) == num_rows


@pytest.mark.parametrize("options", [[], ["--pretrained"], ["vit"]], ids=" ".join)
def test_table_fits_terminal_of_120_columns(options: list[str], cli: Cli) -> None:
    printed = cli("list", *options)
    assert max(map(len, printed.out.splitlines())) <= 120
    headers, *rows = printed.rows
    assert all(any(column) for column in zip(*rows, strict=True)), headers
    assert ("torchvision:NAME and timm:NAME" in printed.out) == ("--pretrained" not in options)


def test_network_is_shown_with_structure_origin_and_license(cli: Cli) -> None:
    printed = cli("show", "resnext101_ipabn_lr_512").out
    for fact in ("42,902,312", "three 3x3", "3b7a221cbc076410eb12c8dd361b7e4e", "ImageNet terms", "79.52", "mod5"):
        assert fact in printed
    shown = json.loads(cli("show", "resnext101_ipabn_lr_512", "--json").out)
    assert (shown["parameters"], shown["published"]["network"]["norm"]) == (42_902_312, "inplace")
    assert shown["stages"][-1] == {"num_chs": 2048, "reduction": 32, "module": "mod5"}
    assert "three 3x3 convolutions" in shown["options"]["input_3x3"]
    assert "checkpoint" in shown["options"]["memory"]
    published = json.loads(cli("show", "revbifpn_s3_imagenet", "--json").out)["published"]
    assert (published["batch"], len(published["sha256"]), published["license"]) == (None, 64, "BSD-3-Clause")
    assert "drive_id" not in published


@pytest.mark.parametrize("name", ["cifar10_resnet18_ipabn", "resnext101_ipabn_lr_512.json"])
def test_shown_experiment_can_be_parsed_again(name: str, cli: Cli) -> None:
    for options in (["--json"], []):
        assert parse_experiment(json.loads(cli("show", name, *options).out), "shown") == load_experiment(name)


def test_name_of_network_and_experiment_is_suggested_once(cli: Cli) -> None:
    assert cli("show", "resnet50_ipabn-sync_lr_51", code=2).err.count("resnet50_ipabn-sync_lr_512") == 1


def test_checkpoint_is_shown_without_building_network(finished: Run, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.registry.get.build_network", lambda *args: pytest.fail("a network was built"))
    lines = cli("show", finished.checkpoint).out.splitlines()
    facts = {line[:INDENT].strip(): line[INDENT:] for line in lines if line[:INDENT].strip()}
    parameters = sum(p.numel() for p in read_checkpoint(finished.checkpoint)["state_dict"].values())
    assert (facts["arch"], facts["norm"], facts["class_names"]) == ("resnet32_cifar", "inplace", "['class0', 'class1']")
    assert (facts["epochs_done"], facts["steps_done"], facts["torch"]) == ("2", "6", torch.__version__)
    assert facts["md5"] == md5_of(finished.checkpoint)
    assert facts["sha256"] == hashlib.sha256(finished.checkpoint.read_bytes()).hexdigest()
    assert 463_000 < int(facts["parameters"].replace(",", "")) < parameters
    assert facts["batch_size"] == "8"
    shown = json.loads(cli("show", finished.checkpoint, "--json").out)
    assert shown["network"] == read_weights(finished.checkpoint).record.content()
    assert (shown["epochs_done"], shown["steps_done"], shown["moving_average"]) == (2, 6, False)
    assert 0 <= shown["best_score"] <= 100
    assert shown["settings"]["optimizer"]["batch_size"] == 8


def test_two_files_are_compared_by_tensor_names(finished: Run, cli: Cli, tmp_path: Path) -> None:
    content = read_checkpoint(finished.checkpoint)
    first, second, last = cli("show", finished.checkpoint, finished.checkpoint).out.splitlines()
    assert first == second == f"{digest(state_tensors(content))}  {finished.checkpoint}"
    assert last == "equal"
    torch.save(content["state_dict"], tmp_path / "bare.pth")
    torch.save({"state_dict": content["state_dict"]}, tmp_path / "wrapped.pth")
    assert cli("show", tmp_path / "bare.pth", tmp_path / "wrapped.pth").out.endswith("equal\n")
    name = next(key for key, tensor in sorted(content["state_dict"].items()) if tensor.shape == (2,))
    content["state_dict"][name][1] += 1
    content["optimizer"]["state"][0]["momentum_buffer"].zero_()
    torch.save(content, tmp_path / "other.pth.tar")
    _, _, *names, last = cli("show", finished.checkpoint, tmp_path / "other.pth.tar", code=3).out.splitlines()
    assert names[0] == f"{name}: 1 of 2 values, by up to 1"
    assert names[1].startswith("optimizer.0.momentum_buffer: ")
    assert last == f"2 of {len(state_tensors(content))} tensors differ"
    for index, tensor in enumerate(content["state_dict"].values()):
        tensor.add_(index < 25)  # floating-point parameters and buffers come first
    torch.save(content, tmp_path / "many.pth.tar")
    _, _, *names, last = cli("show", finished.checkpoint, tmp_path / "many.pth.tar", code=3).out.splitlines()
    assert len(names) == 20
    assert last.endswith("tensors differ (the first 20 above)")


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("input.*_val", ["scale_val", "crop_val", "interpolation_val", "crop_mode_val"]),
        ("label_smoothing", ["label_smoothing"]),
        ("warmup", ["warmup_epochs", "warmup_start", "decay_after_warmup"]),
        ("seed", ["seed"]),
        ("gamma", ["gamma", "gamma"]),
    ],
)
def test_pattern_selects_settings_by_their_dotted_name(pattern: str, keys: list[str], cli: Cli) -> None:
    lines = cli("settings", pattern).out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("   ")] == keys


def test_all_settings_are_printed(cli: Cli) -> None:
    assert cli("settings").out.startswith("the top level: ")
    schema = json.loads(cli("settings", "--json").out)
    assert schema["$defs"]["NetworkSpec"]["properties"]["norm"]["default"] == "standard"


def test_doctor_names_versions_kernels_and_folders(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", "/proc/no-such-folder")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    printed = cli("doctor").out
    built = torch.version.cuda or torch.version.hip
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    assert f"  cuda          {gpus or ('no device found' if built else 'torch is built without CUDA')}" in printed
    for fact in (torch.__version__, "reference", "/proc/no-such-folder (ZOO_CACHE", "4 cores, 1 thread used by torch"):
        assert fact in printed
