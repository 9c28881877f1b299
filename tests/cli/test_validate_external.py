"""``zoo validate`` scores files of other packages' weights with the preprocessing that belongs to them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights
from torchvision.transforms._presets import ImageClassification

from tests.data.sample_images import random_image
from zoo.cli import main
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


def _weights(model: nn.Module, path: Path) -> Path:
    """Save ``model`` as its package does, after changing its random weights so that the predictions differ."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    torch.save(model.state_dict(), path)
    return path


def _check(
    name: str, model: nn.Module, transform: Any, data: Path, weights: Path, tmp_path: Path, *options: str
) -> Any:
    """Compare the command's predictions with ``model`` on images of ``transform``; return the JSON."""
    files = ["--predictions", str(tmp_path / "p.csv"), "--json", str(tmp_path / "r.json")]
    assert main(["validate", name, str(data), "--weights", str(weights), "-j", "0", *files, *options]) == 0
    model.eval()
    with (tmp_path / "p.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6
    for line in lines:
        with torch.no_grad():
            images: Tensor = transform(Image.open(data / line["path"]))[None]
            values, classes = model(images)[0].double().softmax(0).topk(5)
        assert [int(line[f"class{place}"]) for place in range(1, 6)] == classes.tolist()
        assert [float(line[f"probability{place}"]) for place in range(1, 6)] == pytest.approx(values.tolist(), abs=2e-6)
        assert int(line["target"]) == imagenet_wnids().index(Path(line["path"]).parent.name)
    return json.loads((tmp_path / "r.json").read_text())


def test_torchvision(data: Path, tmp_path: Path) -> None:
    name = "mobilenet_v3_small"
    torch.manual_seed(0)
    model = get_model(name, weights=None)
    weights = _weights(model, tmp_path / "w.pth")
    own = get_model_weights(name).DEFAULT.transforms()
    content = _check(f"torchvision:{name}", model, own, data, weights, tmp_path)
    assert content["protocol"] == "center224"
    other = ImageClassification(crop_size=64, resize_size=80, interpolation=own.interpolation.BICUBIC)
    options = ["-c", "64", "-s", "80", "--interpolation", "bicubic"]
    content = _check(f"torchvision:{name}", model, other, data, weights, tmp_path, *options)
    assert content["protocol"] == "center64-scale80-bicubic"


@pytest.mark.parametrize("name", ["resnet10t.c3_in1k", "efficientvit_b0.r224_in1k"])
def test_timm(name: str, data: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name)
    weights = _weights(model, tmp_path / "w.pth")
    config = timm.data.resolve_data_config(model=model, use_test_size=True)
    content = _check(f"timm:{name}", model, timm.data.create_transform(**config), data, weights, tmp_path)
    assert content["protocol"].startswith(f"center{config['input_size'][1]}-scale")
    squashed = timm.data.create_transform(**{**config, "crop_pct": 1.0, "crop_mode": "squash"})
    size = str(config["input_size"][1])
    content = _check(f"timm:{name}", model, squashed, data, weights, tmp_path, "-s", size, "--crop-mode", "squash")
    assert content["protocol"].endswith("-squash")


def test_robustness_set_by_name(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = get_model("shufflenet_v2_x0_5", weights=None)
    weights = _weights(model, tmp_path / "w.pth")
    command = ["validate", "torchvision:shufflenet_v2_x0_5", str(data / "val"), "--weights", str(weights), "-j", "0"]
    files = ["--json", str(tmp_path / "r.json"), "--predictions", str(tmp_path / "p.csv")]
    assert main([*command, "--set", "imagenet-r", *files]) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    assert (content["set"], content["count"], content["top5"]) == ("imagenet-r", 6, 100.0)  # there are three classes
    assert "shufflenet_v2_x0_5, imagenet-r" in capsys.readouterr().out
    with (tmp_path / "p.csv").open() as file:
        assert {int(line["class1"]) for line in csv.DictReader(file)} <= {5, 6, 7}
