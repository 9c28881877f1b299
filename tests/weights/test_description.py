"""A weights file describes its network, and a wrong description is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo import load_weights
from zoo.config.limits import MAX_CLASSES
from zoo.config.network import NetworkSpec, Preprocessing
from zoo.errors import WeightsError
from zoo.weights import read_weights
from zoo.weights.description import parse_description

SPEC = NetworkSpec(
    arch="resnet18",
    activation="relu",
    num_classes=3,
    options={"dilation": [1, 1, 2, 4]},
    class_names=["cat", "dog", "ünicorn"],
    preprocessing=Preprocessing(scale_val=36, crop_val=32, mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25]),
)


def _changed(**changes: Any) -> dict[str, Any]:
    return {**SPEC.model_dump(mode="json"), **changes}


@pytest.fixture(scope="module")
def relu_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a ResNet-18 with relu and three classes, with their record."""
    path: Path = tmp_path_factory.mktemp("record") / "relu.pth"
    torch.manual_seed(0)
    model = zoo.get("resnet18", activation="relu", num_classes=3)
    torch.save({"state_dict": model.state_dict(), "network": _changed(options={})}, path)
    return path


@pytest.mark.parametrize(
    "content",
    [
        {"conv.weight": torch.ones(1)},
        {"state_dict": {}},
        {"state_dict": {}, "config": {"lr": 0.1}},  # of another project's trainer
        {"state_dict": {}, "network": "resnet50"},
        {"network": {"conv.weight": torch.ones(1)}},
    ],
)
def test_files_of_other_trainers_have_no_record(content: dict[str, Any]) -> None:
    assert parse_description(content, "w.pth") == (None, None)


@pytest.mark.parametrize(("classes", "claimed"), [(3, MAX_CLASSES), (3, 0), (0, MAX_CLASSES)])
def test_record_cannot_claim_other_classes_than_file_has(classes: int, claimed: int, tmp_path: Path) -> None:
    """So that no file of a few bytes makes a reader build a classifier of gigabytes."""
    state_dict = {"classifier.fc.weight": torch.ones(classes, 2)} if classes else {"a": torch.ones(1)}
    record = _changed(num_classes=claimed, class_names=None)
    torch.save({"state_dict": state_dict, "network": record}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=f"w.pth: .*num_classes = {claimed}, but the classifier has {classes} "):
        read_weights(tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"network\.num_classes"):
        zoo.get(tmp_path / "w.pth")


def test_options_without_effect_on_weights_do_not_contradict_file(relu_file: Path, tmp_path: Path) -> None:
    model = zoo.get("resnet18", activation="relu", num_classes=3, memory="checkpoint", dilation=[1, 1, 1, 2])
    load_weights(model, relu_file)
    load_weights(zoo.get("resnet18", activation="relu", num_classes=7), relu_file)
    source = zoo.get("revnet38_cifar", grid_bits=14)
    torch.save({"state_dict": source.state_dict(), "network": source.built_as.model_dump()}, tmp_path / "grid.pth")
    assert zoo.get(tmp_path / "grid.pth").mod2.chain.grid_bits == 14
    load_weights(zoo.get("revnet38_cifar", grid_bits=12), tmp_path / "grid.pth")
    source = zoo.get("resnet18", norm="sync", num_classes=3)
    record = _changed(norm="sync", activation="leaky_relu", options={})
    torch.save({"state_dict": source.state_dict(), "network": record}, tmp_path / "sync.pth")
    load_weights(zoo.get("resnet18", norm="inplace", num_classes=3), tmp_path / "sync.pth")
