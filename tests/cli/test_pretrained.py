"""Training starts from published weights of zoo, torchvision and timm, with the classes of the data."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.cli.conftest import Cli
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.config.parse import load_experiment
from zoo.config.published import Digest, published
from zoo.engine._checkpoint import CHECKPOINT
from zoo.models.external import build_external

PUBLISHED = "resnet34_ipabn-sync_lr_512"
pytestmark = pytest.mark.slow  # builds and trains networks of 224 px

SMALL = ["--set", "input.crop_train=32", "--set", "input.scale_val=32", "--set", "input.crop_val=32"]
FROZEN = ["--set", 'optimizer.freeze=["*","!classifier"]', "--epochs", "1", "-j", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=4, num_val=2)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Tensor]]:
    """The state dicts of the weights that each name has."""
    weights = {name: zoo.get(name).state_dict() for name in ("torchvision:shufflenet_v2_x0_5", PUBLISHED)}
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url",
        lambda *_, **__: weights["torchvision:shufflenet_v2_x0_5"],
    )
    timm = pytest.importorskip("timm")
    create = timm.create_model
    weights["timm:vit_tiny_patch16_224"] = create("vit_tiny_patch16_224").state_dict()

    def create_with_weights(name: str, pretrained: bool = False, num_classes: int = 1000, **options: Any) -> Any:
        model = create(name, num_classes=num_classes, **options)
        if pretrained:
            own = weights[f"timm:{name}"]
            keys = [key for key in own if num_classes == 1000 or not key.startswith("head.")]
            model.load_state_dict({key: own[key] for key in keys}, strict=False)
        return model

    monkeypatch.setattr(timm, "create_model", create_with_weights)
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cache" / "weights" / f"{PUBLISHED}.pth.tar"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": weights[PUBLISHED]}, path)
    monkeypatch.setattr(published()[PUBLISHED], "digest", Digest("md5", hashlib.md5(path.read_bytes()).hexdigest()))
    return weights


@pytest.mark.parametrize(
    ("name", "sizes", "images"),
    [
        ("torchvision:shufflenet_v2_x0_5", SMALL, {"mean": [0.485, 0.456, 0.406], "interpolation_val": "bilinear"}),
        ("timm:vit_tiny_patch16_224", [], {"mean": [0.5] * 3, "interpolation_val": "bicubic", "crop_train": 224}),
        (PUBLISHED, SMALL, {"mean": [0.485, 0.456, 0.406]}),
        ("resnet34", SMALL, {"std": [0.229, 0.224, 0.225]}),
    ],
)
def test_training_starts_from_pretrained_weights(
    name: str, sizes: list[str], images: dict[str, Any], sources: Any, data: Path, cli: Cli, tmp_path: Path
) -> None:
    log_dir = tmp_path / "run"
    cli("train", name, data, "--pretrained", "--log-dir", log_dir, *sizes, *FROZEN)
    experiment = load_experiment(log_dir / "experiment.json")
    assert experiment.network.num_classes == 2
    assert {key: getattr(experiment.input, key) for key in images} == images
    model = zoo.get(log_dir / CHECKPOINT)
    expected = sources[PUBLISHED if name == "resnet34" else name]
    differing = {key for key, value in model.state_dict().items() if not torch.equal(value, expected[key])}
    classifier = {key for key in expected if expected[key].shape[:1] == (1000,)}
    assert differing == classifier
    assert len(classifier) == 2
    log = (log_dir / "training_0.log").read_text()
    assert log.count("1,000 classes and the network 2: the network keeps its initial classifier") == 1
    settings: dict[str, Any] = {"optimizer.freeze": ["*", "!classifier"]}
    settings |= {key.split("=")[0]: 32 for key in sizes[1::2]}
    resume: Any = {"log_dir": log_dir, "resume": "auto", "epochs": 1, "settings": settings, "verbose": False}
    assert zoo.train(name, data, pretrained=True, **resume).best_epoch == 0  # nothing is left to train


def test_experiment_keeps_its_settings(sources: Any, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(
        '{"network": {"arch": "torchvision:shufflenet_v2_x0_5", "num_classes": 2}, '
        '"optimizer": {"schedule": {"epochs": 1}}, "input": {"crop_train": 32, "scale_val": 32, "crop_val": 32}}'
    )
    settings = {"optimizer.freeze": ["*", "!classifier"]}
    result = zoo.train(path, data, pretrained=True, log_dir=tmp_path / "run", settings=settings, verbose=False)
    own = sources["torchvision:shufflenet_v2_x0_5"]
    assert all(torch.equal(value, own[key]) for key, value in result.model.state_dict().items() if "fc" not in key)
    assert load_experiment(tmp_path / "run" / "experiment.json").optimizer.learning_rate == 0.1


def test_file_of_package_has_preprocessing_of_package(data: Path, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    torch.save(build_external("timm:vit_tiny_patch16_224").state_dict(), tmp_path / "vit.pth")
    command = ["train", "timm:vit_tiny_patch16_224", data, "--weights", tmp_path / "vit.pth"]
    cli(*command, "--log-dir", tmp_path / "run", *FROZEN)
    assert load_experiment(tmp_path / "run" / "experiment.json").input.mean == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("revnet38_cifar", {}, "revnet38_cifar"),
        ("resnext101", {}, "resnext101_stdbn_lr_256"),
        ("resnet34", {"weights": "x.pth"}, "resnet34: "),
        (torch.nn.Linear(2, 2), {}, "Linear: pretrained: "),
    ],
)
def test_missing_and_second_sources_raise(
    name: Any, options: dict[str, Any], error: str, data: Path, tmp_path: Path
) -> None:
    train = partial(zoo.train, name, data, pretrained=True, log_dir=tmp_path / "run", verbose=False, **options)
    refused(zoo.ZooError, train, error)
    assert not (tmp_path / "run").exists()
