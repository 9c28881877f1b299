"""zoo convert writes the results of the functions, prints and saves the report, and measures with data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision

import zoo
from tests.cli.conftest import Cli, Run
from tests.convert.networks import scramble
from tests.refusals import refused
from zoo.weights import read_state_dict

pytestmark = pytest.mark.slow  # exports networks


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torchvision's and this package's weights of a ResNet-18 with 2 classes."""
    folder = tmp_path_factory.mktemp("convert")
    torch.manual_seed(0)
    torch.save(scramble(torchvision.models.resnet18(num_classes=2)).state_dict(), folder / "tv.pth")
    torch.save(scramble(zoo.get("resnet18", num_classes=2)).state_dict(), folder / "zoo.pth")
    return folder


@pytest.mark.smoke
def test_round_trip_through_files_gives_the_same_weights(files: Path, cli: Cli, tmp_path: Path) -> None:
    first, second, report = tmp_path / "a.pth", tmp_path / "b.pth", tmp_path / "a.json"
    cli("convert", "from-torchvision", files / "tv.pth", first, "--arch", "resnet18", "--json", report)
    assert "to-torchvision resnet18: exact" in cli("convert", "to-torchvision", first, second).out
    given, back = torch.load(files / "tv.pth"), torch.load(second)
    assert all(torch.equal(given[key], back[key]) for key in given)
    content = json.loads(report.read_text())
    assert (content["exact"], content["max_difference"], len(content["layers"])) == (True, None, 41)


@pytest.mark.parametrize("kind", ["standard-to-inplace", "inplace-to-standard", "export"])
def test_torch_loads_written_file_of_each_kind(kind: str, files: Path, cli: Cli, tmp_path: Path) -> None:
    cli("convert", kind, files / "zoo.pth", tmp_path / "new.pth", "--arch", "resnet18")
    assert "classifier.fc.bias" in read_state_dict(tmp_path / "new.pth")
    assert "classifier.fc.bias" in torch.load(tmp_path / "new.pth", weights_only=True)["state_dict"]


def test_checkpoint_is_exported_with_its_own_network(finished: Run, cli: Cli, tmp_path: Path) -> None:
    """In-place norms use scales |w| + eps: read as standard norms, the file would give another network."""
    cli("convert", "export", finished.checkpoint, tmp_path / "x.pth")
    images = torch.randn(2, 3, 10, 10)  # the crop of the run
    with torch.no_grad():
        assert torch.equal(zoo.get(tmp_path / "x.pth").eval()(images), zoo.get(finished.checkpoint).eval()(images))
    standard = zoo.get("resnet18", num_classes=2)
    load = partial(zoo.load_weights, standard, finished.checkpoint)
    refused(zoo.WeightsError, load, "norm='inplace'", "norm='standard'")


def test_existing_file_is_overwritten_only_on_request(files: Path, cli: Cli, tmp_path: Path) -> None:
    (target := tmp_path / "there.pth").write_bytes(b"something that took days")
    command = ["convert", "from-torchvision", files / "tv.pth", target, "--arch", "resnet18"]
    assert f"{target}: TARGET exists already; give another TARGET, or --overwrite" in cli(*command, code=2).err
    assert target.read_bytes() == b"something that took days"
    cli(*command, "--overwrite")
    assert "classifier.fc.bias" in read_state_dict(target)
