"""A weights file describes its network, and a wrong description is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.refusals import refused
from tests.weights.files import save_described
from zoo import load_weights
from zoo.config.limits import MAX_CLASSES
from zoo.config.network import NetworkSpec
from zoo.config.record import NetworkRecord, Preprocessing
from zoo.errors import WeightsError
from zoo.weights import read_weights
from zoo.weights._description import parse_description

pytestmark = pytest.mark.usefixtures("small_networks")

RECORD = NetworkRecord(
    spec=NetworkSpec(arch="resnet18", activation="relu", num_classes=3, options={"dilation": [1, 1, 2, 4]}),
    class_names=["cat", "dog", "ünicorn"],
    preprocessing=Preprocessing(scale_val=36, crop_val=32, mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25]),
)


def _changed(**changes: Any) -> dict[str, Any]:
    return {**RECORD.content(), **changes}


@pytest.fixture(scope="module")
def relu_file(small_networks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a ResNet-18 with relu and three classes, with their record."""
    model = zoo.get("resnet18", activation="relu", num_classes=3)
    return save_described(model, tmp_path_factory.mktemp("record") / "relu.pth", **_changed(options={}))


@pytest.mark.parametrize(
    "content",
    [
        {"conv.weight": torch.ones(1)},
        {"state_dict": {}},
        {"state_dict": {}, "config": {"lr": 0.1}},  # another project's trainer
        {"state_dict": {}, "network": "resnet50"},
        {"network": {"conv.weight": torch.ones(1)}},
    ],
)
def test_files_of_other_trainers_have_no_record(content: dict[str, Any]) -> None:
    assert parse_description(content, "w.pth") == (None, None)


@pytest.mark.parametrize(("num_classes", "claimed"), [(3, MAX_CLASSES), (3, 0), (0, MAX_CLASSES)])
def test_record_cannot_claim_other_classes_than_file_has(num_classes: int, claimed: int, tmp_path: Path) -> None:
    """So that no file of a few bytes makes a reader build a classifier of gigabytes."""
    state_dict = {"classifier.fc.weight": torch.ones(num_classes, 2)} if num_classes else {"a": torch.ones(1)}
    record = _changed(num_classes=claimed, class_names=None)
    torch.save({"state_dict": state_dict, "network": record}, tmp_path / "w.pth")
    names = ("w.pth", f"num_classes = {claimed}", f"the classifier has {num_classes} ")
    refused(WeightsError, lambda: read_weights(tmp_path / "w.pth"), *names)
    refused(WeightsError, lambda: zoo.get(tmp_path / "w.pth"), "network.num_classes")


def test_options_without_effect_on_weights_do_not_contradict_file(relu_file: Path, tmp_path: Path) -> None:
    model = zoo.get("resnet18", activation="relu", num_classes=3, memory="checkpoint", dilation=[1, 1, 1, 2])
    load_weights(model, relu_file)
    load_weights(zoo.get("resnet18", activation="relu", num_classes=7), relu_file)
    grid = save_described(zoo.get("revnet38_cifar", grid_bits=14), tmp_path / "grid.pth")
    assert zoo.get(grid).mod2.chain.grid_bits == 14
    load_weights(zoo.get("revnet38_cifar", grid_bits=12), grid)
    sync = save_described(zoo.get("resnet18", norm="sync", num_classes=3), tmp_path / "sync.pth")
    load_weights(zoo.get("resnet18", norm="inplace", num_classes=3), sync)


# Descriptions of networks, under "network" in checkpoints and weights files.
IMAGES = {"scale_val": 256, "crop_val": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
          "interpolation_val": "bilinear", "crop_mode_val": "center"}  # fmt: skip
CHOSEN = {"arch": "resnet32_cifar", "norm": "inplace", "activation": "elu", "activation_param": 0.5, "num_classes": 3,
          "memory": "auto", "weight_init": "xavier_normal", "weight_gain_multiplier": 1.0, "options": {}}  # fmt: skip
FIXED = {"arch": "revvit_s", "num_classes": 3, "memory": "auto", "options": {"grid_bits": 12}}
EXTERNAL = {"arch": "torchvision:squeezenet1_1", "num_classes": 3, "memory": "lean", "options": {"dropout": 0.1}}
STORED_NETWORKS = [CHOSEN, FIXED, EXTERNAL]


def _checkpoint(network: dict[str, Any], path: Path, **settings: Any) -> Path:
    """Write a checkpoint with this description and these settings of the network."""
    torch.manual_seed(0)
    options = {key: value for key, value in network.items() if key not in ("arch", "options")} | network["options"]
    content = {
        "state_dict": zoo.get(network["arch"], **options).state_dict(),
        "network": {**network, "preprocessing": IMAGES, "class_names": ["a", "b", "c"]},
        "config": {"network": {**network, **settings}, "seed": 3},
        "format_version": 1,
    }
    torch.save(content, path)
    return path


@pytest.mark.parametrize("network", STORED_NETWORKS, ids=lambda network: network["arch"])
def test_checkpoint_of_each_kind_of_network_loads(network: dict[str, Any], tmp_path: Path) -> None:
    path = _checkpoint(network, tmp_path / "w.pth")
    stored = read_weights(path)
    assert stored.record.content() == {**network, "preprocessing": IMAGES, "class_names": ["a", "b", "c"]}
    assert stored.experiment.seed == 3
    assert stored.experiment.record(["a", "b", "c"]) == stored.record
    loaded = zoo.load_network(path)
    assert loaded.class_names == ["a", "b", "c"]
    for model in (zoo.get(path), zoo.get(network["arch"], weights=path), loaded.model):
        assert model.built_as.model_dump(mode="json") == network
        assert all(torch.equal(model.state_dict()[key], value) for key, value in stored.state_dict.items())


def test_checkpoint_that_began_with_weights_of_its_package_loads(tmp_path: Path) -> None:
    path = _checkpoint(EXTERNAL, tmp_path / "w.pth", options={"dropout": 0.1, "pretrained": True})
    assert read_weights(path).experiment.network.options["pretrained"]
    assert zoo.load_network(path).model.built_as.options == {"dropout": 0.1}


@pytest.mark.parametrize("network", STORED_NETWORKS, ids=lambda network: network["arch"])
def test_checkpoint_that_describes_two_networks_raises(network: dict[str, Any], tmp_path: Path) -> None:
    path = _checkpoint(network, tmp_path / "w.pth", num_classes=4)
    refused(WeightsError, lambda: read_weights(path), "two networks")
