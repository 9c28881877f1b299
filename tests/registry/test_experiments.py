"""The experiment of a run: as many classes as the data or the module has, and a notice about default settings."""

from __future__ import annotations

import logging

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from tests.nets import build, small_architectures
from tests.refusals import refused
from zoo.config.network import ExternalSpec, NetworkSpec
from zoo.data.map_dataset import Datasets
from zoo.errors import ConfigError, DataError
from zoo.registry.experiments import default_experiment, experiment_for


class Squares(Dataset[tuple[Image.Image, int]]):
    """Images of three classes."""

    classes = ("cat", "dog", "emu")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (40, 40)), index


class Unnamed(Squares):
    """Images of classes without names."""

    classes = ()  # type: ignore[assignment]


@pytest.mark.parametrize("num_classes", [None, 7])
def test_default_experiment_has_classes_of_data_unless_network_sets_them(num_classes: int | None) -> None:
    spec = NetworkSpec(arch="resnet18") if num_classes is None else NetworkSpec(arch="resnet18", num_classes=7)
    network = default_experiment(spec, Datasets(Squares())).network
    assert (network.arch, network.num_classes) == ("resnet18", num_classes or 3)


def test_data_without_class_names_raise_unless_network_sets_their_number() -> None:
    refused(DataError, lambda: default_experiment(NetworkSpec(arch="resnet18"), Datasets(Unnamed())), "classes")
    assert default_experiment(NetworkSpec(arch="resnet18", num_classes=7), Datasets(Unnamed())).network.num_classes == 7


def test_classes_of_module_are_its_outputs_for_image_of_data() -> None:
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)).train()
    network = default_experiment(module, Datasets(Squares())).network
    assert (network.arch, network.num_classes) == ("module:Sequential", 5)
    assert all(each.training for each in module.modules())
    refused(ConfigError, lambda: default_experiment(module[:1], Datasets(Squares())), "Sequential", "(2, 3, 1, 1)")


def test_module_of_zoo_is_described_unless_it_was_changed() -> None:
    module = build("resnet32_cifar", num_classes=3)
    with small_architectures():
        network = default_experiment(module, Datasets(Squares())).network
        assert (network.arch, network.num_classes) == ("resnet32_cifar", 3)
        module.classifier.fc = nn.Linear(module.classifier.fc.in_features, 7)
        network = default_experiment(module, Datasets(Squares())).network
    assert (network.arch, network.num_classes) == (f"module:{type(module).__name__}", 7)


@pytest.mark.parametrize(("settings", "notices"), [(None, 1), ({"seed": 1}, 0)])
def test_default_settings_are_noticed(settings: dict[str, int] | None, notices: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "zoo"), torch.device("meta"):
        experiment = experiment_for("resnet18", Datasets(Squares()), settings=settings)
    assert caplog.text.count("default settings") == notices
    assert experiment.seed == (settings or {}).get("seed", experiment.seed)


def test_pretrained_network_of_another_package_gets_its_preprocessing() -> None:
    spec = ExternalSpec(arch="torchvision:inception_v3", options={"pretrained": True})
    images = experiment_for(spec, Datasets(Squares())).input
    assert (images.scale_val, images.crop_val, images.crop_train) == (342, 299, 299)
