"""Weights of a file get the norms and the activation of the network that loads them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from tests.convert.networks import scramble
from tests.refusals import refused
from zoo.errors import ConfigError, WeightsError
from zoo.layers.norm import ABN

pytestmark = pytest.mark.usefixtures("small_networks")

CLASSES = 5


def described(model: Any, path: Path) -> Path:
    torch.save({"state_dict": model.state_dict(), "network": model.built_as.model_dump(mode="json")}, path)
    return path


def trained(arch: str = "resnet18", positive: bool = True, **options: Any) -> Any:
    """Return a network with random parameters and statistics; its scales are positive, or of both signs."""
    return scramble(zoo.get(arch, num_classes=CLASSES, **options), positive=positive).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def assert_same_outputs(model: nn.Module, expected: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images()), expected.eval()(images()), rtol=1e-4, atol=1e-4)


class PlainNorm(nn.BatchNorm2d):
    """torch's batch norm, and a leaky ReLU after it."""

    def __init__(self, channels: int, slope: float) -> None:
        super().__init__(channels)
        self.activation, self.activation_param = "leaky_relu", slope
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.leaky_relu(y, self.slope) if self.activation == "leaky_relu" else y


DOORS = {
    "get": lambda path, options: zoo.get("resnet18", weights=path, **options),
    "get the file": lambda path, options: zoo.get(path, **options),
    "load_weights": lambda path, options: _loaded(zoo.get("resnet18", num_classes=CLASSES, **options), path),
}


def _loaded(model: Any, path: Path) -> Any:
    zoo.load_weights(model, path)
    return model


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("before", "after"), [("relu", "leaky_relu"), ("leaky_relu", "elu"), ("elu", "relu")])
def test_another_activation_is_used_with_one_line_notice(
    door: str, before: str, after: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = trained(activation=before)
    path = described(source, tmp_path / "w.pth")
    with caplog.at_level(logging.WARNING):
        model = DOORS[door](path, {"activation": after})
    bare = zoo.get("resnet18", activation=after, num_classes=CLASSES)
    bare.load_state_dict(source.state_dict())
    assert_same_outputs(model, bare)
    (line,) = caplog.messages
    assert line.startswith(f"{path}: trained with {before}")
    assert f"used with {after}" in line
    assert "zoo convert" in line


def test_slope_is_slope_of_network(tmp_path: Path) -> None:
    source = trained(activation="relu")
    model = zoo.get("resnet18", weights=described(source, tmp_path / "w.pth"), activation="leaky_relu",
                    activation_param=0.2)  # fmt: skip
    plain = zoo.get("resnet18", num_classes=CLASSES, norm=lambda channels: PlainNorm(channels, 0.2))
    plain.load_state_dict(source.state_dict())
    assert_same_outputs(model, plain)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("before", "after"), [("standard", "inplace"), ("inplace", "standard"), ("standard", "sync")])
def test_norms_are_converted_exactly_with_report_in_one_line(
    door: str, before: str, after: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = trained(norm=before, activation="leaky_relu", positive=False)
    path = described(source, tmp_path / "w.pth")
    with caplog.at_level(logging.WARNING):
        model = DOORS[door](path, {"norm": after, "activation": "leaky_relu"})
    assert_same_outputs(model, source)
    lines = [line for line in caplog.messages if "exact" in line]
    assert len(lines) == 1
    assert f"{'inplace' if before == 'inplace' else 'standard'}-to-" in lines[0]
    assert model.built_as.norm == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"norm": "standard", "activation": "relu"}, {"norm": "inplace", "activation": "leaky_relu"}),
        ({"norm": "inplace", "activation": "leaky_relu"}, {"norm": "standard", "activation": "relu"}),
        ({"norm": "standard", "activation": "relu"}, {"norm": "inplace", "activation": "elu"}),
    ],
)
def test_norm_and_activation_may_both_differ(before: dict[str, str], after: dict[str, str], tmp_path: Path) -> None:
    source = trained(**before)
    path = described(source, tmp_path / "w.pth")
    same_activation = zoo.get("resnet18", num_classes=CLASSES, norm=before["norm"], activation="leaky_relu")
    model = zoo.get("resnet18", weights=path, **after)
    standard = zoo.get("resnet18", num_classes=CLASSES, norm="standard", activation=after["activation"])
    state_dict = source.state_dict()
    if before["norm"] == "inplace":
        for name, module in same_activation.named_modules():
            if isinstance(module, ABN):
                state_dict[f"{name}.weight"] = state_dict[f"{name}.weight"].abs() + module.eps
    standard.load_state_dict(state_dict)
    assert_same_outputs(model, standard)


def test_inexact_conversions_raise_with_remedy(tmp_path: Path) -> None:
    source = trained("resnext50", norm="standard", activation="leaky_relu", positive=False)
    path = described(source, tmp_path / "w.pth")
    refused(
        WeightsError,
        lambda: zoo.get("resnext50", weights=path, norm="inplace"),
        "w.pth",
        "norm='standard'",
        "negative scales",
        "--allow-approximate",
    )


def test_relu_weights_need_activation_for_in_place_norms(tmp_path: Path) -> None:
    source = trained(activation="relu")
    path = described(source, tmp_path / "relu.pth")
    refused(
        ConfigError,
        lambda: zoo.get("resnet18", weights=path, norm="inplace"),
        'activation = "relu"',
        '"inplace"',
        "leaky_relu",
    )
    model = zoo.get("resnet18", weights=path, norm="inplace", activation="leaky_relu")
    built_first = zoo.get("resnet18", num_classes=CLASSES, norm="inplace")
    zoo.load_weights(built_first, path)
    assert_same_outputs(built_first, model)


def test_body_of_deeplab_follows_the_same_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = trained(norm="standard", activation="relu")
    path = described(source, tmp_path / "w.pth")
    model = zoo.get("deeplab_resnet18", body_weights=path, norm="inplace", activation="leaky_relu", num_classes=3)
    assert "trained with relu and used with leaky_relu" in caplog.text
    assert "standard-to-inplace resnet18: exact" in caplog.text
    weight = source.state_dict()["mod2.block1.convs.bn1.weight"]
    torch.testing.assert_close(model.body.state_dict()["mod2.block1.convs.bn1.weight"], weight - 1e-5)


def test_weights_of_another_network_still_raise(tmp_path: Path) -> None:
    path = described(trained(activation="relu"), tmp_path / "w.pth")
    refused(
        WeightsError,
        lambda: zoo.get("resnet34", weights=path, activation="leaky_relu"),
        "arch='resnet18'",
        "arch='resnet34'",
    )
    refused(
        WeightsError,
        lambda: zoo.get("resnext50", weights=described(trained("resnext50", input_3x3=True), path), input_3x3=False),
        "input_3x3",
    )
