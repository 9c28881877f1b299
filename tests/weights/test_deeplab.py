"""Weights of DeepLab: the published container, checkpoints of flat keys, and weights for the body alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.nets import differing
from tests.refusals import refused
from tests.weights.files import save_described
from zoo.config.architectures import ARCHITECTURES
from zoo.errors import ConfigError, WeightsError
from zoo.layers import InPlaceABN, InPlaceABNSync
from zoo.weights import read_state_dict
from zoo.weights._description import check_same_network, has_same_tensors

pytestmark = pytest.mark.usefixtures("small_networks")


@pytest.fixture(scope="module")
def model(small_networks: None) -> nn.Module:
    return zoo.get("deeplab_resnet18", norm="inplace", num_classes=4, pooling_size=(3, 4))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, model: nn.Module) -> Path:
    """A folder with a body that describes its network, the same weights without description, and a DeepLab."""
    folder = tmp_path_factory.mktemp("files")
    network = zoo.get("resnet18", norm="inplace", num_classes=7, activation_param=0.2)
    save_described(network, folder / "body.pth")
    torch.save(network.state_dict(), folder / "bare.pth")
    torch.save({"state_dict": container(model)}, folder / "deeplab.pth")
    return folder


def container(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the state dict in the published form: one of each part, without batch counters, as of 2018."""
    return {
        part: {key: tensor for key, tensor in module.state_dict().items() if not key.endswith("num_batches_tracked")}
        for part, module in model.named_children()
    }


@pytest.mark.parametrize("form", ["container", "bare", "flat", "wrapped"])
def test_published_container_and_flat_checkpoints_load_strictly(model, form, tmp_path: Path) -> None:
    content: Any = {
        "container": {"state_dict": container(model), "training_meta": {"epoch": 90}},
        "bare": container(model),
        "flat": {"state_dict": model.state_dict()},
        "wrapped": {"state_dict": {f"module.{key}": tensor for key, tensor in model.state_dict().items()}},
    }[form]
    torch.save(content, path := tmp_path / "w.pth.tar")
    arguments: dict[str, Any] = {"norm": "inplace", "activation": "leaky_relu", "num_classes": 4}
    other = zoo.get("deeplab_resnet18", **arguments)
    assert zoo.load_weights(other, path).classifier == "loaded"
    for loaded in (zoo.get("deeplab_resnet18", weights=path, **arguments), other):
        assert differing(loaded.state_dict(), model.state_dict()) == []
    assert next(iter(read_state_dict(path))).startswith("body.")


def test_checkpoint_describes_its_network(model: nn.Module, tmp_path: Path) -> None:
    path = save_described(model, tmp_path / "w.pth")
    same = zoo.get(path)
    assert differing(same.state_dict(), model.state_dict()) == []
    assert (same.num_classes, same.head.pooling_size) == (4, [3, 4])
    nine = zoo.get("deeplab_resnet18", norm="inplace", num_classes=9)
    assert zoo.load_weights(nine, path).classifier == "kept"
    assert torch.equal(nine.head.red_conv.weight, model.head.red_conv.weight)
    assert nine.num_classes == 9
    assert not hasattr(zoo.get("deeplab_resnet18", norm="inplace", num_classes=0, weights=path), "cls")


def test_body_loads_classification_weights_and_logs_skipped_keys(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zoo")
    source, body = zoo.get(files / "body.pth"), {"body_weights": files / "body.pth"}
    model = zoo.get("deeplab_resnet18", num_classes=5, in_chans=1, **body)
    settings = model.built_as
    assert (settings.norm, settings.activation_param, settings.num_classes) == ("inplace", 0.2, 5)
    assert isinstance(model.head.red_bn, InPlaceABN)
    assert torch.equal(model.body.mod5.block1.convs.conv2.weight, source.mod5.block1.convs.conv2.weight)
    num = len(source.state_dict()) - 2
    assert "the classifier was not loaded" in caplog.text
    assert f"loaded {num} tensors into the body; head and cls keep their initial values" in caplog.text
    synchronized = zoo.get("deeplab_resnet18", num_classes=5, norm="sync", activation_param=0.2, **body)
    assert isinstance(synchronized.body.mod1.bn1, InPlaceABNSync)

    model = zoo.get("deeplab_resnet18", norm="sync", activation_param=0.2, num_classes=5)
    head = {key: tensor.clone() for key, tensor in model.state_dict().items() if not key.startswith("body.")}
    report = zoo.load_weights(model, files / "body.pth")
    assert (report.num_loaded, report.classifier, report.initial) == (num, "dropped", ("head", "cls"))
    assert torch.equal(model.body.mod1.conv1.weight, source.mod1.conv1.weight)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in head.items())


def test_stem_of_body_is_the_one_of_the_file(tmp_path: Path) -> None:
    network = zoo.get("resnext50", num_classes=3, input_3x3=True)
    path = save_described(network, tmp_path / "w.pth")
    model = zoo.get("deeplab_resnext50", num_classes=5, body_weights=path)
    assert model.built_as.options["input_3x3"]
    assert torch.equal(model.body.mod1.conv1.weight, network.mod1.conv1.weight)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "names"),
    [
        ("resnet18", {"weights": "deeplab.pth"}, WeightsError, ["segmentation", "deeplab_*"]),
        ("deeplab_resnet18", {"weights": "body.pth"}, WeightsError, ["arch='resnet18'", "arch='deeplab_resnet18'"]),
        ("deeplab_resnet18", {"weights": "bare.pth"}, WeightsError, ["segmentation", "body_weights"]),
        ("deeplab_resnet34", {"body_weights": "body.pth"}, WeightsError, ["arch='resnet18'", "arch='resnet34'"]),
        ("resnet18", {"body_weights": "body.pth"}, ConfigError, ["body_weights", "resnet18"]),
        (
            "deeplab_resnet18",
            {"weights": "body.pth", "body_weights": "body.pth"},
            ConfigError,
            ["two sources", "body_weights"],
        ),
    ],
)
def test_weights_of_another_network_raise(name, arguments, error, names, files: Path) -> None:
    arguments = {key: files / file for key, file in arguments.items()}
    norm = {} if "deeplab_resnet34" in name else {"norm": "inplace"}
    refused(error, lambda: zoo.get(name, **norm, **arguments), *names)


def test_a2_body_takes_weights_of_plain_form() -> None:
    """Pools and dropout, in which they differ, hold no tensors."""
    assert has_same_tensors("wider_resnet38", "wider_resnet38_a2")
    assert not has_same_tensors("wider_resnet38", "wider_resnet20_a2")
    assert not has_same_tensors("resnet50", "resnet101")
    assert all(has_same_tensors(name, name) for name in ARCHITECTURES)
    with torch.device("meta"):
        plain, a2 = zoo.get("wider_resnet16", norm="inplace"), zoo.get("deeplab_wider_resnet16_a2", norm="inplace")
    assert list(a2.body.state_dict()) == [key for key in plain.state_dict() if not key.startswith("classifier.")]
    check_same_network(plain.built_as, a2.built_as.model_dump(), "file", is_body=True)
