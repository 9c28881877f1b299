"""zoo convert writes what the functions return, prints and saves the report, and measures with data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

import zoo
from tests.convert.networks import scramble
from tests.engine.tiny import make_pictures
from zoo.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with torchvision's and this package's weights of a ResNet-18 with 2 classes, and pictures."""
    folder = tmp_path_factory.mktemp("convert")
    torch.manual_seed(0)
    torch.save(scramble(torchvision.models.resnet18(num_classes=2)).state_dict(), folder / "tv.pth")
    torch.save(scramble(zoo.get("resnet18", classes=2)).state_dict(), folder / "zoo.pth")
    make_pictures(folder / "data", num_train=24, num_val=7)
    return folder


def convert(kind, source, target, *options):
    return main(["convert", kind, str(source), str(target), "--arch", "resnet18", *options])


def test_there_and_back_through_files_gives_the_same_weights(files, tmp_path, capsys):
    assert convert("from-torchvision", files / "tv.pth", tmp_path / "a.pth", "--json", str(tmp_path / "a.json")) == 0
    assert convert("to-torchvision", tmp_path / "a.pth", tmp_path / "b.pth") == 0
    given, back = torch.load(files / "tv.pth"), torch.load(tmp_path / "b.pth")
    assert all(torch.equal(given[key], back[key]) for key in given)
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["exactness"], report["max_difference"], len(report["layers"])) == ("exact", 0.0, 41)
    assert "to-torchvision resnet18: exact" in capsys.readouterr().out
    zoo.get("resnet18", classes=2, weights=tmp_path / "a.pth", activation="relu")


@pytest.mark.parametrize("kind", ["standard-to-inplace", "inplace-to-standard", "fold"])
def test_each_kind_writes_a_file_that_torch_loads(kind, files, tmp_path):
    assert convert(kind, files / "zoo.pth", tmp_path / "new.pth", "--no-compare") == 0
    assert "classifier.fc.bias" in torch.load(tmp_path / "new.pth")


def test_accuracy_is_measured_before_and_after_and_statistics_estimated_again(files, tmp_path):
    options = ["--data", str(files / "data"), "--reestimate", "3", "--batch-size", "8", "-s", "12", "-c", "10"]
    report_file = tmp_path / "report.json"
    target = tmp_path / "leaky.pth"
    assert (
        convert("relu-to-leaky-relu", files / "zoo.pth", target, *options, "-j", "0", "--json", str(report_file)) == 0
    )
    report = json.loads(report_file.read_text())
    assert [report[name]["count"] for name in ("before", "converted", "reestimated")] == [7, 7, 7]
    assert 0 <= report["before"]["top1"] <= report["before"]["top5"] == 100
    assert "3 batches" in report["reason"]
    given, new = torch.load(files / "zoo.pth"), torch.load(target)
    assert new["mod1.bn1.num_batches_tracked"] == 3
    assert not torch.allclose(new["mod1.bn1.running_mean"], given["mod1.bn1.running_mean"])
    assert torch.equal(new["mod1.bn1.weight"], given["mod1.bn1.weight"])


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own loader
def test_export_writes_a_program_that_computes_what_the_network_does(files, tmp_path):
    assert convert("export", files / "zoo.pth", tmp_path / "net.pt2", "-c", "32", "--norm", "inplace") == 0
    model = zoo.get("resnet18", classes=2, norm="inplace", weights=files / "zoo.pth").eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(torch.export.load(tmp_path / "net.pt2").module()(images), model(images), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("fold", ["--data", "d"], "--data goes with relu-to-leaky-relu, not with fold"),
        ("from-torchvision", ["--input-3x3"], "--input-3x3 goes with"),
        ("relu-to-leaky-relu", ["--reestimate", "2"], "--reestimate needs pictures"),
        ("to-torchvision", [], "missing"),
    ],
)
def test_mistakes_are_one_message_and_leave_no_file(kind, options, message, files, tmp_path, capsys):
    source = files / ("tv.pth" if kind == "to-torchvision" else "zoo.pth")
    assert convert(kind, source, tmp_path / "new.pth", *options) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_source_is_never_overwritten(files, capsys):
    assert convert("fold", files / "zoo.pth", files / "zoo.pth") == 2
    assert "is the source too" in capsys.readouterr().err


def test_the_script_is_the_command():
    script, environment = ROOT / "scripts" / "convert.py", {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, "--help"], env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    assert b"from-torchvision" in done.stdout


def test_a_file_that_cannot_be_converted_is_named(files, tmp_path, capsys):
    assert convert("from-torchvision", files / "zoo.pth", tmp_path / "x.pth") == 2
    assert f"zoo convert: {files / 'zoo.pth'}: the state dict is not that of resnet18" in capsys.readouterr().err
    assert not (tmp_path / "x.pth").exists()
