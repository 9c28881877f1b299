"""Checkpoints of networks of other packages name their network: everything that takes a checkpoint takes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.engine.checkpoint import read
from zoo.remat.lean import is_lean
from zoo.weights import read_weights

pytestmark = pytest.mark.slow  # networks of torchvision and timm

SMALL = "torchvision:shufflenet_v2_x0_5"
PREPROCESSING = {"scale_val": 48, "crop_val": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25],
                 "interpolation_val": "bilinear", "crop_mode_val": "center"}  # fmt: skip


@pytest.fixture(scope="module", params=[SMALL, "timm:resnet10t"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """The network, the checkpoint of a run of one epoch, and the data."""
    if request.param.startswith("timm:"):
        pytest.importorskip("timm")
    root = tmp_path_factory.mktemp("run")
    data = make_images(root / "data", num_train=8, num_val=4)
    size = {"crop_train": 32, "scale_val": 48, "crop_val": 32, "mean": [0.5] * 3, "std": [0.25] * 3}
    settings = {
        "network": {"arch": request.param, "classes": 2, "memory": "lean"},
        "optimizer": {"batch_size": 8, "schedule": {"epochs": 1}},
        "input": size,
    }
    (root / "x.json").write_text(json.dumps(settings))
    assert main(["train", str(root / "x.json"), str(data), "--log-dir", str(root / "log"), "-j", "0"]) == 0
    return request.param, root / "log" / "checkpoint.pth.tar", data


def test_checkpoint_names_its_network(trained: tuple[str, Path, Path]) -> None:
    arch, checkpoint, _ = trained
    assert read(checkpoint)["network"] == {
        "arch": arch, "num_classes": 2, "memory": "lean", "options": {}, "class_names": ["class0", "class1"],
        "preprocessing": PREPROCESSING,
    }  # fmt: skip


def test_zoo_get_builds_network_of_checkpoint(trained: tuple[str, Path, Path]) -> None:
    arch, path, _ = trained
    model, weights = zoo.get(path), read_weights(path).state_dict
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert is_lean(model)
    assert not is_lean(zoo.get(path, memory="plain"))
    named = zoo.get(arch, weights=path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(named.eval()(images), model.eval()(images))
    assert model.pretrained_cfg["crop"] == 32
    assert type(zoo.transforms(model)).__name__ == "ValTransform"
    assert zoo.load_network(path).class_names == ["class0", "class1"]
    refused(zoo.WeightsError, lambda: zoo.get("resnet18", weights=path), f"arch='{arch}'", "arch='resnet18'")


def test_classifier_for_other_classes_is_omitted(
    trained: tuple[str, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, checkpoint, _ = trained
    weights = read_weights(checkpoint).state_dict
    model = zoo.get(checkpoint, num_classes=5)
    assert "the classifier has 2 classes and the network 5" in caplog.text
    differing = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, weights[key])}
    assert differing == {"fc.weight", "fc.bias"}
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_run_begins_with_pretrained_weights_for_other_classes(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    arch, checkpoint, _ = trained
    data = make_images(tmp_path / "data", num_train=6, num_val=2)
    for split in ("train", "val"):
        shutil.copytree(data / split / "class0", data / split / "class2")
    settings = {
        "network": {"arch": arch, "classes": 3},
        "optimizer": {"batch_size": 9, "schedule": {"epochs": 1}},
        "input": {"crop_train": 32, "scale_val": 32, "crop_val": 32},
    }
    (tmp_path / "x.json").write_text(json.dumps(settings))
    command = ["train", str(tmp_path / "x.json"), str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]
    assert main([*command, "--weights", str(checkpoint)]) == 0
    assert "the network keeps its initial classifier" in (tmp_path / "log" / "training_0.log").read_text()


def _changed(checkpoint: Path, path: Path, **changes: Any) -> Path:
    content = read(checkpoint)
    torch.save({"state_dict": content["state_dict"], "network": {**content["network"], **changes}}, path)
    return path


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"norm": "standard"}, "network.norm = "),
        ({"options": {"pretrained": True}}, "network.options: pretrained"),
        ({"num_classes": 3}, "x.pth"),
        ({"arch": "torchvision:resnet18"}, "ResNet"),
    ],
)
def test_impossible_records_fail(
    changes: dict[str, Any], key: str, trained: tuple[str, Path, Path], tmp_path: Path
) -> None:
    path = _changed(trained[1], tmp_path / "x.pth", **changes)
    refused(zoo.WeightsError, lambda: zoo.get(path), key)
