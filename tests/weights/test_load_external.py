"""Weights files of other packages load into their networks, except for a classifier with other classes."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.errors import WeightsError

# Each network with its classifier: linear, convolutional, with an auxiliary one, with a norm in it.
CLASSIFIERS = {
    "torchvision:shufflenet_v2_x0_5": {"fc.weight", "fc.bias"},
    "torchvision:squeezenet1_1": {"classifier.1.weight", "classifier.1.bias"},
    "torchvision:lraspp_mobilenet_v3_large": {
        f"classifier.{part}_classifier.{name}" for part in ("low", "high") for name in ("weight", "bias")
    },
    "timm:mobilenetv3_small_050": {"classifier.weight", "classifier.bias"},
    "timm:resnet10t": {"fc.weight", "fc.bias"},
    "timm:levit_128s": {f"{head}.linear.{name}" for head in ("head", "head_dist") for name in ("weight", "bias")},
    "timm:deit_tiny_distilled_patch16_224": {
        f"{head}.{name}" for head in ("head", "head_dist") for name in ("weight", "bias")
    },
}


def _build(name: str, **options: Any) -> nn.Module:
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    return zoo.get(name, **options)


def _save(model: nn.Module, folder: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """Write random weights of a network; return them and the file."""
    own = model.state_dict()
    weights = {key: torch.rand_like(value) if value.is_floating_point() else value for key, value in own.items()}
    torch.save(weights, folder / "own.pth")
    return weights, folder / "own.pth"


def _differing(model: nn.Module, weights: dict[str, torch.Tensor]) -> set[str]:
    return {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, weights[key])}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier_is_loaded_unless_classes_differ(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, path = _save(_build(name, num_classes=11), tmp_path)
    same = _build(name, num_classes=11)
    assert zoo.load_weights(same, path).classifier == "loaded"
    assert not _differing(same, weights)
    model = _build(name, num_classes=3, weights=path)
    assert _differing(model, weights) == CLASSIFIERS[name]
    assert "the classifier has 11 classes and the network 3: the network keeps its initial classifier" in caplog.text
    report = zoo.load_weights(model, path)
    assert (report.classifier, report.num_loaded) == ("kept", len(weights) - len(CLASSIFIERS[name]))


def test_network_without_number_of_classes_keeps_classifier(tmp_path: Path) -> None:
    weights, path = _save(_build("torchvision:shufflenet_v2_x0_5", num_classes=3), tmp_path)
    model = _build("torchvision:shufflenet_v2_x0_5", weights=path)
    assert _differing(model, weights) == {"fc.weight", "fc.bias"}
    assert model.get_parameter("fc.bias").shape == (1000,)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("timm:resnet10t", {"num_classes": 0}),
        ("timm:levit_128s", {"num_classes": 0}),
        ("timm:resnet10t", {"features_only": True}),
        ("timm:mobilenetv3_small_050", {"features_only": True}),
    ],
)
def test_network_without_classifier_drops_it(
    name: str, how: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights, path = _save(_build(name), tmp_path)
    with caplog.at_level(logging.INFO, logger="zoo"):
        model = _build(name, weights=path, **how)
    assert not _differing(model, weights)
    assert "the classifier was not loaded because the network has none" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc.weight": None}, r"missing in the file \(1\): fc.weight"),
        ({"fc.weight": torch.ones(5, 8)}, r"of another shape .*: fc.weight: \(5, 8\) in the file, \(3, 1024\)"),
        ({"fc.weight": torch.tensor(1.0)}, r"of another shape .*: fc.weight: \(\) in the file"),
        ({"fc.bias": torch.ones(7)}, r"of another shape .*: fc.weight: .*fc.bias: \(7,\) in the file"),
        ({"fc.weight": torch.ones(0, 1024), "fc.bias": torch.ones(0)}, r"fc.weight: \(0, 1024\) in the file"),
        ({"conv1.0.weight": torch.ones(2, 3, 3, 3)}, r"conv1.0.weight: \(2, 3, 3, 3\) in the file"),
        ({"extra": torch.ones(2)}, r"unknown to the network \(1\): extra"),
    ],
)
def test_other_differences_raise_with_remedy(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = _build("torchvision:shufflenet_v2_x0_5", num_classes=3)
    weights = _build("torchvision:shufflenet_v2_x0_5", num_classes=5).state_dict() | changes
    torch.save({key: tensor for key, tensor in weights.items() if tensor is not None}, tmp_path / "w.pth")
    message = refused(WeightsError, lambda: zoo.load_weights(model, tmp_path / "w.pth"), "number of classes")
    assert re.search(words, message, re.DOTALL)
    assert "input_3x3" not in message


def test_unnamed_network_error_has_remedy(tmp_path: Path) -> None:
    _, path = _save(nn.Linear(2, 5), tmp_path)
    refused(WeightsError, lambda: zoo.load_weights(nn.Linear(2, 3), path), "Linear", "number of classes")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=8, num_val=4)


@pytest.mark.slow
@pytest.mark.smoke
def test_command_fine_tunes_and_scores_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "torchvision:shufflenet_v2_x0_5"
    _, path = _save(_build(name), tmp_path)
    settings = {"network": {"arch": name, "classes": 2}, "input": {"crop_train": 32, "scale_val": 32, "crop_val": 32},
                "optimizer": {"batch_size": 8, "schedule": {"epochs": 1}}}  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps(settings))
    command = ["train", str(tmp_path / "x.json"), str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]
    assert main([*command, "--weights", str(path)]) == 0
    assert "the network keeps its initial classifier" in (tmp_path / "log" / "training_0.log").read_text()
    bare = tmp_path / "bare.pth"
    torch.save(zoo.get(tmp_path / "log" / "checkpoint.pth.tar").state_dict(), bare)
    validate = ["validate", name, str(data), "--weights", str(bare), "-j", "0", "--crop", "32", "--scale", "32"]
    assert main([*validate, "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["count"] == 4


@pytest.mark.parametrize("name", ["torchvision:shufflenet_v2_x0_5", "timm:resnet10t", "resnet18", "deeplab_resnet18"])
def test_file_without_description_is_scored_with_its_classes(name: str, tmp_path: Path) -> None:
    weights, path = _save(_build(name, num_classes=3), tmp_path)
    loaded = zoo.load_network(name, path)
    assert loaded.experiment.network.num_classes == 3
    assert not _differing(loaded.model, weights)
