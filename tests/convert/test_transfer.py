"""Weights of a file get the norms and the activation of the network that loads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.convert.networks import scramble
from tests.nets import images
from tests.refusals import refused
from tests.weights.files import save_described
from zoo.errors import ConfigError, WeightsError
from zoo.layers.norm import ABN

pytestmark = pytest.mark.usefixtures("small_networks")

CLASSES = 5
Save = Callable[..., Any]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """A function that writes w.pth with random weights of a network, and returns the network and the path."""

    def save(arch: str = "resnet18", positive: bool = True, **options: Any) -> tuple[Any, Path]:
        model = scramble(zoo.get(arch, num_classes=CLASSES, **options), positive=positive).eval()
        return model, save_described(model, tmp_path / "w.pth")

    return save


def assert_same_outputs(model: nn.Module, expected: nn.Module) -> None:
    x = images(2, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x.clone()), expected.eval()(x.clone()), rtol=1e-4, atol=1e-4)


class PlainNorm(nn.BatchNorm2d):
    """torch's batch norm, and a leaky ReLU after it."""

    def __init__(self, channels: int, slope: float) -> None:
        super().__init__(channels)
        self.activation, self.activation_param = "leaky_relu", slope
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.leaky_relu(y, self.slope) if self.activation == "leaky_relu" else y


def _loaded(path: Path, options: dict[str, Any]) -> Any:
    model = zoo.get("resnet18", num_classes=CLASSES, **options)
    zoo.load_weights(model, path)
    return model


DOORS = {
    "get": lambda path, options: zoo.get("resnet18", weights=path, **options),
    "get the file": lambda path, options: zoo.get(path, **options),
    "load_weights": _loaded,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("before", "after"), [("relu", "leaky_relu"), ("leaky_relu", "elu"), ("elu", "relu")])
def test_another_activation_is_used_with_one_line_notice(
    door: str, before: str, after: str, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    source, path = save(activation=before)
    with caplog.at_level(logging.WARNING):
        model = DOORS[door](path, {"activation": after})
    bare = zoo.get("resnet18", activation=after, num_classes=CLASSES)
    bare.load_state_dict(source.state_dict())
    assert_same_outputs(model, bare)
    (line,) = caplog.messages
    assert line.startswith(f"{path}: trained with {before}")
    assert f"used with {after}" in line
    assert "zoo convert" in line


def test_norms_get_slope_of_network(save: Save) -> None:
    source, path = save(activation="relu")
    model = zoo.get("resnet18", weights=path, activation="leaky_relu", activation_param=0.2)
    plain = zoo.get("resnet18", num_classes=CLASSES, norm=lambda channels: PlainNorm(channels, 0.2))
    plain.load_state_dict(source.state_dict())
    assert_same_outputs(model, plain)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("before", "after"), [("standard", "inplace"), ("inplace", "standard"), ("standard", "sync")])
def test_norms_are_converted_exactly_with_report_in_one_line(
    door: str, before: str, after: str, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    source, path = save(norm=before, activation="leaky_relu", positive=False)
    with caplog.at_level(logging.WARNING):
        model = DOORS[door](path, {"norm": after, "activation": "leaky_relu"})
    assert_same_outputs(model, source)
    (line,) = [line for line in caplog.messages if "exact" in line]
    assert f"{before}-to-" in line
    assert model.built_as.norm == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"norm": "standard", "activation": "relu"}, {"norm": "inplace", "activation": "leaky_relu"}),
        ({"norm": "inplace", "activation": "leaky_relu"}, {"norm": "standard", "activation": "relu"}),
        ({"norm": "standard", "activation": "relu"}, {"norm": "inplace", "activation": "elu"}),
    ],
)
def test_norm_and_activation_may_both_differ(before: dict[str, str], after: dict[str, str], save: Save) -> None:
    source, path = save(**before)
    model = zoo.get("resnet18", weights=path, **after)
    standard = zoo.get("resnet18", num_classes=CLASSES, norm="standard", activation=after["activation"])
    state_dict = source.state_dict()
    if before["norm"] == "inplace":
        for name, module in source.named_modules():
            if isinstance(module, ABN):
                state_dict[f"{name}.weight"] = state_dict[f"{name}.weight"].abs() + module.eps
    standard.load_state_dict(state_dict)
    assert_same_outputs(model, standard)


def test_built_network_keeps_its_activation(save: Save) -> None:
    _, path = save(activation="relu")
    model = zoo.get("resnet18", weights=path, norm="inplace", activation="leaky_relu")
    assert_same_outputs(_loaded(path, {"norm": "inplace"}), model)


def test_body_of_deeplab_follows_the_same_rule(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    source, path = save(norm="standard", activation="relu")
    model = zoo.get("deeplab_resnet18", body_weights=path, norm="inplace", activation="leaky_relu", num_classes=3)
    assert "trained with relu and used with leaky_relu" in caplog.text
    assert "standard-to-inplace resnet18: exact" in caplog.text
    weight = source.state_dict()["mod2.block1.convs.bn1.weight"]
    torch.testing.assert_close(model.body.state_dict()["mod2.block1.convs.bn1.weight"], weight - 1e-5)


INEXACT = {"arch": "resnext50", "norm": "standard", "activation": "leaky_relu", "positive": False}
RELU = {"arch": "resnet18", "activation": "relu"}


@pytest.mark.parametrize(
    ("file", "arch", "arguments", "error", "names"),
    [
        (
            INEXACT,
            "resnext50",
            {"norm": "inplace"},
            WeightsError,
            ["w.pth", "norm='standard'", "negative scales", "--allow-approximate"],
        ),
        (RELU, "resnet18", {"norm": "inplace"}, ConfigError, ['activation = "relu"', '"inplace"', "leaky_relu"]),
        (RELU, "resnet34", {"activation": "leaky_relu"}, WeightsError, ["arch='resnet18'", "arch='resnet34'"]),
        (RELU, "resnet34_ipabn-sync_lr_512", {}, WeightsError, ["w.pth", "arch='resnet18'", "arch='resnet34'"]),
        ({"arch": "resnext50", "input_3x3": True}, "resnext50", {"input_3x3": False}, WeightsError, ["input_3x3"]),
    ],
)
def test_other_contradictions_raise(
    file: dict[str, Any], arch: str, arguments: dict[str, Any], error: type[Exception], names: list[str], save: Save
) -> None:
    _, path = save(**file)
    refused(error, lambda: zoo.get(arch, weights=path, **arguments), *names)
