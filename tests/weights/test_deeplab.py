"""Weights of DeepLab: the published container, checkpoints of flat keys, and weights for the body alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.refusals import refused
from zoo.config.architectures import ARCHITECTURES
from zoo.errors import ConfigError, WeightsError
from zoo.layers import InPlaceABN, InPlaceABNSync
from zoo.weights import read_state_dict
from zoo.weights.description import check_same_network, has_same_tensors

pytestmark = pytest.mark.usefixtures("small_networks")

COUNTER = "num_batches_tracked"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return zoo.get("deeplab_resnet18", norm="inplace", num_classes=4, pooling_size=(3, 4))


@pytest.fixture(scope="module")
def body_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights file of a classification network that describes its network."""
    network = zoo.get("resnet18", norm="inplace", num_classes=7, activation_param=0.2)
    path = tmp_path_factory.mktemp("body") / "resnet18.pth"
    torch.save({"state_dict": network.state_dict(), "network": network.built_as.model_dump(mode="json")}, path)
    return path


def container(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the state dict in the published form: one of each part, without batch counters, as of 2018."""
    return {
        part: {key: tensor for key, tensor in module.state_dict().items() if not key.endswith(COUNTER)}
        for part, module in model.named_children()
    }


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def equal(first: nn.Module, second: nn.Module) -> bool:
    other = second.state_dict()
    return all(torch.equal(tensor, other.pop(key)) for key, tensor in first.state_dict().items()) and not other


@pytest.mark.parametrize("form", ["container", "bare", "flat", "wrapped"])
def test_published_container_and_flat_checkpoints_load_strictly(model, form, tmp_path: Path) -> None:
    content: Any = {
        "container": {"state_dict": container(model), "training_meta": {"epoch": 90}},
        "bare": container(model),
        "flat": {"state_dict": model.state_dict()},
        "wrapped": {"state_dict": {f"module.{key}": tensor for key, tensor in model.state_dict().items()}},
    }[form]
    path = write(tmp_path / "w.pth.tar", content)
    arguments: dict[str, Any] = {"norm": "inplace", "activation": "leaky_relu", "num_classes": 4}
    assert equal(zoo.get("deeplab_resnet18", weights=path, **arguments), model)
    other = zoo.get("deeplab_resnet18", **arguments)
    report = zoo.load_weights(other, path)
    assert equal(other, model)
    assert report.classifier == "loaded"
    assert next(iter(read_state_dict(path))).startswith("body.")


def test_checkpoint_describes_its_network(model: nn.Module, tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.pth", {"state_dict": model.state_dict(), "network": model.built_as.model_dump(mode="json")}
    )
    same = zoo.get(path)
    assert equal(same, model)
    assert (same.num_classes, same.head.pooling_size) == (4, [3, 4])
    nine = zoo.get("deeplab_resnet18", norm="inplace", num_classes=9)
    assert zoo.load_weights(nine, path).classifier == "kept"
    assert torch.equal(nine.head.red_conv.weight, model.head.red_conv.weight)
    assert nine.num_classes == 9
    headless = zoo.get("deeplab_resnet18", norm="inplace", num_classes=0, weights=path)
    assert not hasattr(headless, "cls")


def test_files_of_the_other_task_name_command_for_them(model: nn.Module, body_file: Path, tmp_path: Path) -> None:
    deeplab = write(tmp_path / "deeplab.pth", {"state_dict": container(model)})
    refused(WeightsError, lambda: zoo.get("resnet18", norm="inplace", weights=deeplab), "segmentation", "deeplab_*")
    refused(
        WeightsError,
        lambda: zoo.get("deeplab_resnet18", weights=body_file),
        "arch='resnet18'",
        "arch='deeplab_resnet18'",
    )
    bare = write(tmp_path / "bare.pth", read_state_dict(body_file))
    refused(WeightsError, lambda: zoo.get("deeplab_resnet18", weights=bare), "segmentation", "body_weights")


def test_body_loads_classification_weights_and_logs_skipped_keys(
    body_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zoo")
    source = zoo.get(body_file)
    model = zoo.get("deeplab_resnet18", num_classes=5, body_weights=body_file, in_chans=1)
    settings = model.built_as
    assert (settings.norm, settings.activation_param, settings.num_classes) == ("inplace", 0.2, 5)
    assert isinstance(model.head.red_bn, InPlaceABN)
    assert torch.equal(model.body.mod5.block1.convs.conv2.weight, source.mod5.block1.convs.conv2.weight)
    assert "the classifier was not loaded" in caplog.text
    assert "loaded 84 tensors into the body; head and cls keep their initial values" in caplog.text
    synchronized = zoo.get("deeplab_resnet18", num_classes=5, body_weights=body_file, norm="sync", activation_param=0.2)
    assert isinstance(synchronized.body.mod1.bn1, InPlaceABNSync)


def test_stem_of_body_is_the_one_of_the_file(tmp_path: Path) -> None:
    network = zoo.get("resnext50", num_classes=3, input_3x3=True)
    content = {"state_dict": network.state_dict(), "network": network.built_as.model_dump(mode="json")}
    model = zoo.get("deeplab_resnext50", num_classes=5, body_weights=write(tmp_path / "w.pth", content))
    assert model.built_as.options["input_3x3"]
    assert torch.equal(model.body.mod1.conv1.weight, network.mod1.conv1.weight)


def test_load_weights_puts_classification_network_into_body(body_file: Path) -> None:
    model = zoo.get("deeplab_resnet18", norm="sync", activation_param=0.2, num_classes=5)
    head = {key: tensor.clone() for key, tensor in model.state_dict().items() if not key.startswith("body.")}
    report = zoo.load_weights(model, body_file)
    assert (report.num_loaded, report.classifier, report.initial) == (84, "dropped", ("head", "cls"))
    assert torch.equal(model.body.mod1.conv1.weight, read_state_dict(body_file)["mod1.conv1.weight"])
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in head.items())


@pytest.mark.parametrize(
    ("name", "arguments", "error", "names"),
    [
        ("deeplab_resnet34", {}, WeightsError, ["arch='resnet18'", "arch='resnet34'"]),
        ("resnet18", {}, ConfigError, ["body_weights", "resnet18"]),
        ("deeplab_resnet18", {"weights": True}, ConfigError, ["two sources", "body_weights"]),
    ],
)
def test_weights_of_another_body_raise(name, arguments, error, names, body_file: Path) -> None:
    if "weights" in arguments:
        arguments = {"weights": body_file, "norm": "inplace"}
    refused(error, lambda: zoo.get(name, body_weights=body_file, **arguments), *names)


def test_a2_body_takes_weights_of_plain_form() -> None:
    """Pools and dropout, in which they differ, hold no tensors."""
    assert has_same_tensors("wider_resnet38", "wider_resnet38_a2")
    assert not has_same_tensors("wider_resnet38", "wider_resnet20_a2")
    assert not has_same_tensors("resnet50", "resnet50".replace("50", "101"))
    assert all(has_same_tensors(name, name) for name in ARCHITECTURES)
    with torch.device("meta"):
        plain, a2 = zoo.get("wider_resnet16", norm="inplace"), zoo.get("deeplab_wider_resnet16_a2", norm="inplace")
    assert list(a2.body.state_dict()) == [key for key in plain.state_dict() if not key.startswith("classifier.")]
    check_same_network(plain.built_as, a2.built_as.model_dump(), "file", is_body=True)
