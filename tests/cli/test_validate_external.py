"""``zoo validate`` scores files of other packages' weights with the preprocessing that belongs to them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights
from torchvision.transforms._presets import ImageClassification

from tests.cli.conftest import Cli
from tests.data.sample_images import random_image
from zoo.data.imagenet import imagenet_wnids

WNIDS = imagenet_wnids()[5:8]
pytestmark = pytest.mark.slow  # networks of other packages


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for index, wnid in enumerate(WNIDS):
        (root / "val" / wnid).mkdir(parents=True)
        for size in ((90, 70), (61, 83)):
            random_image(index, *size).save(root / "val" / wnid / f"{size[0]}.jpg")
    return root


def _weights(model: nn.Module, path: Path) -> None:
    """Save ``model`` as its package does, after changing its random weights so that the predictions differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    torch.save(model.state_dict(), path)


Check = Callable[..., Any]


@pytest.fixture
def check(cli: Cli, data: Path, tmp_path: Path) -> Check:
    """Return the function that compares the command's predictions with a model on images of its ``transform``."""

    def run(name: str, model: nn.Module, transform: Any, *options: str) -> Any:
        files = ["--predictions", tmp_path / "p.csv", "--json", tmp_path / "r.json"]
        cli("validate", name, data, "--weights", tmp_path / "w.pth", "-j", 0, *files, *options)
        model.eval()
        lines = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
        assert len(lines) == 6
        for line in lines:
            with torch.no_grad():
                images: Tensor = transform(Image.open(data / line["path"]))[None]
                values, classes = model(images)[0].double().softmax(0).topk(5)
            assert [int(line[f"class{n}"]) for n in range(1, 6)] == classes.tolist()
            assert [float(line[f"probability{n}"]) for n in range(1, 6)] == pytest.approx(values.tolist(), abs=2e-6)
            assert int(line["target"]) == imagenet_wnids().index(Path(line["path"]).parent.name)
        return json.loads((tmp_path / "r.json").read_text())

    return run


def test_torchvision(check: Check, tmp_path: Path) -> None:
    name = "mobilenet_v3_small"
    torch.manual_seed(0)
    model = get_model(name, weights=None)
    _weights(model, tmp_path / "w.pth")
    own = get_model_weights(name).DEFAULT.transforms()
    assert check(f"torchvision:{name}", model, own)["protocol"] == "center224"
    other = ImageClassification(crop_size=64, resize_size=80, interpolation=own.interpolation.BICUBIC)
    content = check(f"torchvision:{name}", model, other, "-c", "64", "-s", "80", "--interpolation", "bicubic")
    assert content["protocol"] == "center64-scale80-bicubic"


@pytest.mark.parametrize("name", ["resnet10t.c3_in1k", "efficientvit_b0.r224_in1k"])
def test_timm(name: str, check: Check, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name)
    _weights(model, tmp_path / "w.pth")
    config = timm.data.resolve_data_config(model=model, use_test_size=True)
    size = str(config["input_size"][1])
    content = check(f"timm:{name}", model, timm.data.create_transform(**config))
    assert content["protocol"].startswith(f"center{size}-scale")
    squashed = timm.data.create_transform(**{**config, "crop_pct": 1.0, "crop_mode": "squash"})
    content = check(f"timm:{name}", model, squashed, "-s", size, "--crop-mode", "squash")
    assert content["protocol"].endswith("-squash")


def test_robustness_set_by_name(data: Path, cli: Cli, tmp_path: Path) -> None:
    _weights(get_model("shufflenet_v2_x0_5", weights=None), tmp_path / "w.pth")
    command = ["validate", "torchvision:shufflenet_v2_x0_5", data / "val", "--weights", tmp_path / "w.pth", "-j", 0]
    files = ["--json", tmp_path / "r.json", "--predictions", tmp_path / "p.csv"]
    assert "shufflenet_v2_x0_5, imagenet-r" in cli(*command, "--set", "imagenet-r", *files).out
    content = json.loads((tmp_path / "r.json").read_text())
    assert (content["set"], content["count"], content["top5"]) == ("imagenet-r", 6, 100.0)  # there are three classes
    lines = csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    assert {int(line["class1"]) for line in lines} <= {5, 6, 7}
