"""One file that defines a family, and one import, add networks to the whole package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zoo
from tests.data.sample_labels import make_labeled
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.config.architectures import ARCHITECTURES
from zoo.config.record import NetworkRecord
from zoo.convert._files import save_weights
from zoo.models import Network
from zoo.models.family import FAMILIES, RECORDS, family

NAME = "tests.models.ladder"


@pytest.fixture(autouse=True)
def ladder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The imported family, removed after the test."""
    registries = (ARCHITECTURES, FAMILIES, RECORDS)
    before = [dict(registry) for registry in registries]  # type: ignore[call-overload]
    sys.modules.pop(NAME, None)
    yield import_module(NAME)
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)  # type: ignore[attr-defined]


def test_network_is_built_with_its_options() -> None:
    model = zoo.get("ladder_long", width=16, num_classes=4)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 4)
    maps = zoo.get("ladder_short", output_stride=8, features_only=True, norm="inplace")(torch.randn(1, 3, 64, 64))
    assert [tuple(x.shape) for x in maps] == [(1, 8, 16, 16), (1, 16, 8, 8), (1, 32, 8, 8), (1, 64, 8, 8)]
    assert zoo.get("ladder_short", features_only=True).feature_info.reduction() == [4, 8, 16, 32]


def test_lean_step_is_bit_identical_to_plain_step() -> None:
    gradients = []
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for memory in ("plain", "lean"):
        torch.manual_seed(0)
        model = zoo.get("ladder_short", memory=memory)
        model(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"width": 12}, ["width = 12: "]),
        ({"dilation": 3}, ["dilation = 3: "]),
        ({"memory": "checkpoint"}, ['memory = "checkpoint"', "auto, plain, lean"]),
    ],
)
def test_wrong_option_raises(options: dict[str, object], names: list[str]) -> None:
    refused(zoo.ConfigError, lambda: zoo.get("ladder_short", **options), *names)


def test_list_and_show_describe_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "*ladder*"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "ladder" in line]
    parts = [tuple(cell.strip() for cell in row.split("|")[1:5]) for row in rows]
    parameters = f"{sum(p.numel() for p in zoo.get('ladder_short').parameters()) / 1e6:.2f}"
    assert ("ladder_short", parameters, "7", "8 16 32 64") in parts
    assert [name for name, *_ in parts] == [
        f"{prefix}ladder_{size}" for prefix in ("deeplab_", "") for size in ("long", "short")
    ]
    assert main(["show", "ladder_long"]) == 0
    assert "Channels of the first rung" in capsys.readouterr().out


def test_network_can_be_body_of_deeplab() -> None:
    model = zoo.get("deeplab_ladder_short", num_classes=3).eval()
    assert model.body.feature_info.reduction()[-1] == 8
    assert model(torch.randn(1, 3, 64, 96)).shape == (1, 3, 64, 96)


@pytest.mark.slow
def test_network_and_its_deeplab_are_trained_and_loaded(tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", num_train=8, num_val=4)
    settings = {"input.crop_train": 32, "input.scale_val": 32, "input.crop_val": 32}
    words = [f"--set={key}={value}" for key, value in settings.items()]
    command = ["train", "ladder_short", str(images), "--log-dir", str(tmp_path / "log"), "-j", "0", "--epochs", "1"]
    assert main([*command, "--batch-size", "4", *words]) == 0
    trained = zoo.get(tmp_path / "log" / "checkpoint.pth.tar")
    assert type(trained).__name__ == "Ladder"

    scenes, experiment = make_labeled(tmp_path / "scenes", num_train=4, num_val=2), tmp_path / "deeplab.json"
    content = {"network": {"arch": "deeplab_ladder_short", "classes": 3}, "input": {"crop_train": 32}}
    content["optimizer"] = {"batch_size": 4, "schedule": {"epochs": 1}}
    experiment.write_text(json.dumps(content))
    assert main(["train", str(experiment), str(scenes), "--log-dir", str(tmp_path / "deeplab"), "-j", "0"]) == 0
    assert zoo.get(tmp_path / "deeplab" / "checkpoint.pth.tar").body.num_features == 64


def test_weights_file_describes_network(tmp_path: Path) -> None:
    model = zoo.get("ladder_long", width=16)
    save_weights(model.state_dict(), NetworkRecord(spec=model.built_as), tmp_path / "ladder.pth")
    assert torch.equal(zoo.get(tmp_path / "ladder.pth").stem[0].weight, model.stem[0].weight)
    body = zoo.get("deeplab_ladder_long", num_classes=3)
    refused(zoo.WeightsError, lambda: zoo.load_weights(body, tmp_path / "ladder.pth"), "stem.0.weight")


def test_reimported_module_replaces_its_networks(ladder: ModuleType) -> None:
    family("ladder", {"ladder_short": {"rungs": (2, 2)}}, options=ladder.LadderOptions)(ladder.Ladder)
    assert ARCHITECTURES["ladder_short"].structure == {"rungs": (2, 2)}


@pytest.mark.parametrize(
    ("name", "network"), [("mine", "resnet18"), ("resnet", "my_resnet"), ("mine", "deeplab_resnet18")]
)
def test_name_of_another_family_raises(name: str, network: str) -> None:
    refused(
        zoo.ConfigError,
        lambda: family(name, {network: {}})(type("Mine", (Network,), {})),
        f"{name if name == 'resnet' else network}: ",
        "zoo.models",
    )
    assert "my_resnet" not in ARCHITECTURES
