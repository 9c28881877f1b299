"""`zoo train ARCHITECTURE DATA` trains with default settings, which it writes as an experiment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zoo
from tests.engine.tiny import make_images
from zoo.cli import main
from zoo.config import load_experiment, parse_experiment
from zoo.run.experiments import default_experiment, with_changes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=4, num_val=2)


@pytest.mark.parametrize("name", ["resnet32_cifar", "torchvision:shufflenet_v2_x0_5"])
def test_an_architecture_is_trained_by_its_name(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_epoch(arch: str, folder: Path, sections: None = None) -> zoo.config.Experiment:
        settings = default_experiment(arch, folder).model_dump(mode="json")
        settings["optimizer"]["schedule"]["epochs"] = 1
        settings["input"] |= {"crop_train": 32, "scale_val": 32, "crop_val": 32}
        return parse_experiment(settings, "test")

    monkeypatch.setattr("zoo.run.experiments.default_experiment", one_epoch)
    assert main(["train", name, str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 0
    printed = capsys.readouterr().err
    assert f"{name} is an architecture, not an experiment, and is trained with default settings" in printed
    assert load_experiment(tmp_path / "log" / "experiment.json") == one_epoch(name, data)
    model = zoo.get(tmp_path / "log" / "checkpoint.pth.tar")
    assert type(model) is type(zoo.get(name, num_classes=2))


def test_too_few_epochs_for_a_warm_up_are_refused_with_a_number_that_works() -> None:
    recipe = load_experiment("imagenet_convnext_tiny")
    with pytest.raises(zoo.ConfigError, match=r"warmup_epochs = 20.0: .*--epochs 21.* warmup_epochs, such as to 0.1,"):
        with_changes(recipe, epochs=1)
    assert with_changes(recipe, epochs=21).optimizer.schedule.epochs == 21
    settings = recipe.model_dump(mode="json")
    settings["optimizer"]["schedule"] |= {"epochs": 1, "warmup_epochs": 0.1}
    assert parse_experiment(settings, "test").optimizer.schedule.warmup_epochs == 0.1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet19", "there is no network, experiment or file called resnet19; the nearest names are resnet18"),
        ("deeplab_resnet18", "deeplab_resnet18 is a segmentation network, and a folder does not specify the layout"),
        ("torchvision:resnet19", "torchvision has no network called 'resnet19'; the nearest names are"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_by_its_name_is_refused(
    name: str, words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", name, str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "log").exists()
