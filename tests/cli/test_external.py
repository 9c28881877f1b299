"""Networks of other packages are trained, resumed, scored, shown and loaded like networks of this package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.cli.conftest import Cli, Run, events
from tests.engine.tiny import differences, make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.engine._checkpoint import read
from zoo.remat._lean import is_lean
from zoo.weights import read_weights

pytestmark = pytest.mark.slow  # networks of torchvision and timm

SMALL, OF_TIMM = "torchvision:shufflenet_v2_x0_5", "timm:resnet10t"
PREPROCESSING = {"scale_val": 48, "crop_val": 32, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25],
                 "interpolation_val": "bilinear", "crop_mode_val": "center"}  # fmt: skip


def _train(folder: Path, data: Path, network: dict[str, Any], *options: str, crop: int = 48) -> int:
    """Train in folder/log, on images whose maps are too large to be kept as small tensors."""
    optimizer = {"batch_size": 8, "learning_rate": 0.01, "ema_decay": 0.9, "schedule": {"epochs": 2}}
    images = {"crop_train": 48, "scale_val": 48, "crop_val": crop, "mean": [0.5] * 3, "std": [0.25] * 3}
    folder.mkdir(exist_ok=True)
    settings = {"network": {"num_classes": 2, **network}, "optimizer": optimizer, "input": images}
    (folder / "x.json").write_text(json.dumps(settings))
    command = ["train", str(folder / "x.json"), str(data), "--log-dir", str(folder / "log"), "-j", "0", "-p", "1"]
    return main([*command, *options])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=24, num_val=7)


@pytest.fixture(scope="module")
def lean(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A lean run of two epochs of 3 steps."""
    root = tmp_path_factory.mktemp("lean")
    assert _train(root, data, {"arch": SMALL, "memory": "lean"}, crop=32) == 0
    return Run(root / "x.json", data, root / "log")


@pytest.fixture(scope="module", params=[SMALL, OF_TIMM])
def trained(request: pytest.FixtureRequest, lean: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A network, and the checkpoint of a lean run of it."""
    if request.param == SMALL:
        return SMALL, lean.checkpoint
    pytest.importorskip("timm")
    root = tmp_path_factory.mktemp("timm")
    assert _train(root, lean.data, {"arch": OF_TIMM, "memory": "lean"}, "--epochs", "1", crop=32) == 0
    return OF_TIMM, root / "log" / "checkpoint.pth.tar"


def _curve(run: Run) -> list[tuple[Any, ...]]:
    return [tuple(event.get(key) for key in ("event", "step", "loss", "top1")) for event in events(run.log_dir)]


def test_lean_run_is_bit_identical_to_plain_run(lean: Run, tmp_path: Path) -> None:
    assert _train(tmp_path, lean.data, {"arch": SMALL, "memory": "plain"}, crop=32) == 0
    plain = Run(tmp_path / "x.json", lean.data, tmp_path / "log")
    assert [event for event, *_ in _curve(lean)].count("train") == 6
    assert _curve(lean) == _curve(plain)
    assert [is_lean(zoo.load_network(run.checkpoint).model) for run in (plain, lean)] == [False, True]
    ours, theirs = (read(run.checkpoint) for run in (plain, lean))
    for content in (ours, theirs):
        assert content["config"]["network"].pop("memory") == content["network"].pop("memory")
    assert {key for key in ours if differences(ours[key], theirs[key])} == {"config_digest"}


def test_checkpoint_is_scored_used_and_shown(lean: Run, cli: Cli, tmp_path: Path) -> None:
    cli("validate", lean.checkpoint, lean.data, "-j", 0, "--json", tmp_path / "scores.json")
    assert json.loads((tmp_path / "scores.json").read_text())["top1"] == _curve(lean)[-2][3]
    cli("validate", SMALL, lean.data, "--weights", lean.checkpoint, "-j", 0)
    # The checkpoint has the class names of the training data.
    assert "class1" in cli("predict", lean.checkpoint, lean.data / "val" / "class0" / "0.png").out
    assert SMALL in cli("show", lean.checkpoint).out
    assert "auto, plain, lean" in cli("show", SMALL).out


def test_zoo_get_builds_network_of_checkpoint(trained: tuple[str, Path]) -> None:
    arch, path = trained
    assert read(path)["network"] == {
        "arch": arch, "num_classes": 2, "memory": "lean", "options": {}, "class_names": ["class0", "class1"],
        "preprocessing": PREPROCESSING,
    }  # fmt: skip
    model, weights = zoo.get(path), read_weights(path).state_dict
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert is_lean(model)
    assert not is_lean(zoo.get(path, memory="plain"))
    named = zoo.get(arch, weights=path)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(named.eval()(images), model.eval()(images))
    assert model.pretrained_cfg["crop"] == 32
    assert type(zoo.transforms(model)).__name__ == "ValTransform"
    assert zoo.load_network(path).class_names == ["class0", "class1"]
    refused(zoo.WeightsError, lambda: zoo.get("resnet18", weights=path), f"arch='{arch}'", "arch='resnet18'")


def test_classifier_for_other_classes_is_omitted(
    trained: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arch, checkpoint = trained
    weights = read_weights(checkpoint).state_dict
    model = zoo.get(checkpoint, num_classes=5)
    assert "the classifier has 2 classes and the network 5" in caplog.text
    differing = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, weights[key])}
    assert differing == {"fc.weight", "fc.bias"}
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    data = make_images(tmp_path / "data", num_train=6, num_val=2)
    for split in ("train", "val"):
        shutil.copytree(data / split / "class0", data / split / "class2")
    network = {"arch": arch, "num_classes": 3}
    assert _train(tmp_path, data, network, "--weights", str(checkpoint), "--epochs", "1") == 0
    assert "the network keeps its initial classifier" in (tmp_path / "log" / "training_0.log").read_text()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"norm": "standard"}, "network.norm = "),
        ({"options": {"pretrained": True}}, "network.options: pretrained"),
        ({"num_classes": 3}, "x.pth"),
        ({"arch": "torchvision:resnet18"}, "ResNet"),
    ],
)
def test_impossible_records_fail(changes: dict[str, Any], key: str, trained: tuple[str, Path], tmp_path: Path) -> None:
    content, path = read(trained[1]), tmp_path / "x.pth"
    torch.save({"state_dict": content["state_dict"], "network": {**content["network"], **changes}}, path)
    refused(zoo.WeightsError, lambda: zoo.get(path), key)
