"""`zoo train ARCHITECTURE DATA` trains with default settings, which it writes as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

import zoo
from tests.data.sample_images import make_folder
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.config.network import NetworkSpec, Spec, parse_spec
from zoo.config.parse import load_experiment, parse_experiment
from zoo.registry.experiments import default_experiment, with_changes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=4, num_val=2)


@pytest.mark.parametrize("name", ["resnet32_cifar", "torchvision:shufflenet_v2_x0_5"])
def test_architecture_is_trained_by_its_name(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_epoch(
        network: Spec, folder: Path, sections: dict[str, Any] | None = None
    ) -> zoo.config.experiment.Experiment:
        settings = default_experiment(network, folder).model_dump(mode="json")
        settings["optimizer"]["schedule"]["epochs"] = 1
        settings["input"] |= {"crop_train": 32, "scale_val": 32, "crop_val": 32}
        return parse_experiment(settings, "test")

    monkeypatch.setattr("zoo.registry.experiments.default_experiment", one_epoch)
    assert main(["train", name, str(data), "--log-dir", str(tmp_path / "log"), "-j", "0"]) == 0
    printed = capsys.readouterr().err
    assert f"{name} with default settings; experiment.json in the log folder has all of them" in printed
    assert load_experiment(tmp_path / "log" / "experiment.json") == one_epoch(parse_spec({"arch": name}, name), data)
    model = zoo.get(tmp_path / "log" / "checkpoint.pth.tar")
    assert type(model) is type(zoo.get(name, num_classes=2))


def test_fewer_epochs_than_warm_up_raise_with_valid_number() -> None:
    recipe = load_experiment("imagenet_convnext_tiny")
    refused(zoo.ConfigError, lambda: with_changes(recipe, epochs=1), "warmup_epochs = 20.0", "--epochs 21", "0.1")
    assert with_changes(recipe, epochs=21).optimizer.schedule.epochs == 21
    settings = recipe.model_dump(mode="json")
    settings["optimizer"]["schedule"] |= {"epochs": 1, "warmup_epochs": 0.1}
    assert parse_experiment(settings, "test").optimizer.schedule.warmup_epochs == 0.1


def test_fewer_class_folders_in_val_than_in_train_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "data" / "train", {"ant": 2, "bee": 2, "cat": 2})
    make_folder(tmp_path / "data" / "val", {"images": 2})
    command = ["train", "resnet32_cifar", str(tmp_path / "data"), "--log-dir", str(tmp_path / "log"), "-j", "0"]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert "different classes (3 only in train/: ant, bee, cat; 1 only in val/: images)" in printed


def test_unicode_composition_of_class_name_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, form in (("train", "NFD"), ("val", "NFC")):
        make_folder(tmp_path / "data" / split, {normalize(form, "café"): 2, "tea": 2})
    command = ["train", "resnet32_cifar", str(tmp_path / "data"), "--log-dir", str(tmp_path / "log"), "-j", "0"]
    assert main(command) == 2
    assert "differ only in the Unicode composition of a letter" in capsys.readouterr().err


def test_missing_classes_are_named_again_at_the_end_of_run(data: Path, tmp_path: Path) -> None:
    config = with_changes(default_experiment(NetworkSpec(arch="resnet32_cifar"), data), epochs=1).model_dump(
        mode="json"
    )
    config["network"]["num_classes"] = 1000
    config["input"] |= {"crop_train": 32, "scale_val": 32, "crop_val": 32}
    zoo.train(parse_experiment(config, "test"), data, log_dir=tmp_path / "log")
    lines = (tmp_path / "log" / "training_0.log").read_text().splitlines()
    assert "2 class folders for a network with 1,000 outputs; set network.num_classes to 2" in lines[-1]
