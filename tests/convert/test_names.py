"""Conversions take the name of a network in place of its description."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision

from tests.refusals import refused
from zoo.config.network import NetworkSpec
from zoo.config.published import published_record
from zoo.convert import from_torchvision, inplace_to_standard, relu_to_leaky_relu, standard_to_inplace
from zoo.convert.conversion import source_spec
from zoo.errors import ConfigError, ConversionError, WeightsError, ZooError


def test_architecture_name_selects_network_to_convert() -> None:
    given = torchvision.models.resnet18(num_classes=3).state_dict()
    relu, spec, _ = from_torchvision(given, "resnet18")
    assert spec == NetworkSpec(arch="resnet18", activation="relu", num_classes=3, memory="auto")
    leaky, target, _ = relu_to_leaky_relu(relu, "resnet18")
    assert target.activation == "leaky_relu"
    inplace, target, _ = standard_to_inplace(leaky, "resnet18")
    assert (target.norm, target.activation) == ("inplace", "leaky_relu")
    _, target, report = inplace_to_standard(inplace, "resnet18")
    assert (target.norm, report.arch) == ("standard", "resnet18")


def test_published_name_stands_for_network() -> None:
    name = "resnet34_ipabn-sync_lr_512"
    weights = {"classifier.fc.weight": torch.zeros(7, 512), "classifier.fc.bias": torch.zeros(7)}
    spec = source_spec(weights, name, "inplace-to-standard")
    assert spec == published_record(name).spec.changed(num_classes=7, memory="auto")


def test_external_networks_raise_with_valid_name() -> None:
    refused(ConversionError, lambda: relu_to_leaky_relu({}, "torchvision:resnet50"), "torchvision", "--arch resnet50")
    refused(ConversionError, lambda: relu_to_leaky_relu({}, "torchvision:vgg11"), "zoo convert export")
    refused(ConfigError, lambda: relu_to_leaky_relu({}, "resnet19"), "resnet19", "resnet18")


def test_command_prints_valid_name_alone(tmp_path: Path) -> None:
    from zoo.convert.files import convert_file

    torch.save(torchvision.models.resnet18(num_classes=2).state_dict(), tmp_path / "tv.pth")
    with pytest.raises(ConversionError) as caught:
        convert_file("relu-to-leaky-relu", tmp_path / "tv.pth", tmp_path / "out.pth", {"arch": "torchvision:resnet18"})
    assert "--arch resnet18" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_state_dict_of_torchvision_is_recognized_with_function_to_call() -> None:
    refused(
        WeightsError,
        lambda: relu_to_leaky_relu(torchvision.models.resnet18().state_dict(), "resnet18"),
        "zoo.convert.from_torchvision",
    )


def test_misspelled_argument_of_description_names_the_nearest() -> None:
    with pytest.raises(ZooError) as caught:
        NetworkSpec(arch="resnet50", actvation="relu")
    assert str(caught.value) == 'NetworkSpec: actvation = "relu": unknown key; the nearest is activation'
    refused(ZooError, lambda: NetworkSpec(zzz=1), "NetworkSpec", "zzz = 1")
