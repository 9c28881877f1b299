"""zoo convert writes the results of the functions, prints and saves the report, and measures with data."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torchvision

import zoo
from tests.convert.networks import scramble
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.weights import read_state_dict

pytestmark = pytest.mark.slow  # exports networks


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with torchvision's and this package's weights of a ResNet-18 with 2 classes, and images."""
    folder = tmp_path_factory.mktemp("convert")
    torch.manual_seed(0)
    torch.save(scramble(torchvision.models.resnet18(num_classes=2)).state_dict(), folder / "tv.pth")
    torch.save(scramble(zoo.get("resnet18", num_classes=2)).state_dict(), folder / "zoo.pth")
    make_images(folder / "data", num_train=24, num_val=7)
    return folder


def convert(kind, source, target, *options):
    return main(["convert", kind, str(source), str(target), "--arch", "resnet18", *options])


@pytest.mark.smoke
def test_round_trip_through_files_gives_the_same_weights(files, tmp_path, capsys):
    assert convert("from-torchvision", files / "tv.pth", tmp_path / "a.pth", "--json", str(tmp_path / "a.json")) == 0
    assert convert("to-torchvision", tmp_path / "a.pth", tmp_path / "b.pth") == 0
    given, back = torch.load(files / "tv.pth"), torch.load(tmp_path / "b.pth")
    assert all(torch.equal(given[key], back[key]) for key in given)
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["exact"], report["max_difference"], len(report["layers"])) == (True, None, 41)
    assert "to-torchvision resnet18: exact" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["standard-to-inplace", "inplace-to-standard", "export"])
def test_torch_loads_written_file_of_each_kind(kind, files, tmp_path):
    assert convert(kind, files / "zoo.pth", tmp_path / "new.pth") == 0
    assert "classifier.fc.bias" in read_state_dict(tmp_path / "new.pth")
    assert "classifier.fc.bias" in torch.load(tmp_path / "new.pth", weights_only=True)["state_dict"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("from-torchvision", ["--input-3x3"], "--input-3x3 goes with"),
        ("to-torchvision", [], "missing"),
    ],
)
def test_user_errors_print_one_message_and_leave_no_file(kind, options, message, files, tmp_path, capsys):
    source = files / ("tv.pth" if kind == "to-torchvision" else "zoo.pth")
    assert convert(kind, source, tmp_path / "new.pth", *options) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def run(kind, source, target, *options):
    """Convert without naming the network."""
    return main(["convert", kind, str(source), str(target), *options])


def test_file_without_network_description_asks_for_name(files, tmp_path, capsys):
    assert run("export", files / "zoo.pth", tmp_path / "x.pth") == 2
    message = capsys.readouterr().err
    assert "does not say which network it belongs to" in message
    assert "--arch" in message


def test_checkpoint_is_exported_with_its_own_network(finished, tmp_path):
    """In-place norms use scales |w| + eps: read as standard norms, the file would give another network."""
    assert run("export", finished.checkpoint, tmp_path / "x.pth") == 0
    images = torch.randn(2, 3, 10, 10)  # the crop of the run
    with torch.no_grad():
        assert torch.equal(zoo.get(tmp_path / "x.pth").eval()(images), zoo.get(finished.checkpoint).eval()(images))
    standard = zoo.get("resnet18", num_classes=2)
    load = partial(zoo.load_weights, standard, finished.checkpoint)
    refused(zoo.WeightsError, load, "norm='inplace'", "norm='standard'")


def test_existing_file_is_overwritten_only_on_request(files, tmp_path, capsys):
    target = tmp_path / "there.pth"
    target.write_bytes(b"something that took days")
    assert convert("from-torchvision", files / "tv.pth", target) == 2
    assert f"{target}: TARGET exists already; give another TARGET, or --overwrite" in capsys.readouterr().err
    assert target.read_bytes() == b"something that took days"
    assert convert("from-torchvision", files / "tv.pth", target, "--overwrite") == 0
    assert "classifier.fc.bias" in read_state_dict(target)
