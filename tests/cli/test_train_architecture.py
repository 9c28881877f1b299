"""`zoo train ARCHITECTURE DATA` trains with default settings, which it prints and writes as an experiment."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import zoo
from tests.engine.tiny import make_images
from zoo.cli import main
from zoo.cli.train import Train
from zoo.config import load_experiment, parse_experiment
from zoo.data.location import parse_data_path
from zoo.run.experiments import default_experiment, experiment_for


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
    assert f'network.arch = "{name}"' in printed
    assert "network.num_classes = 2\n" in printed
    assert 'optimizer.schedule.type = "cosine"\n' in printed
    assert load_experiment(tmp_path / "log" / "experiment.json") == one_epoch(name, data)
    model = zoo.get(tmp_path / "log" / "checkpoint.pth.tar")
    assert type(model) is type(zoo.get(name, num_classes=2))


def test_a_folder_with_the_name_of_the_architecture_may_be_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the log folder of an earlier run."""
    monkeypatch.chdir(tmp_path)
    Path("resnet18").mkdir()
    assert experiment_for("resnet18", parse_data_path(data)).network.arch == "resnet18"


def test_the_logged_settings_have_the_changes_of_the_command(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.run.training.train_experiment", lambda *args: None)
    changes = ["--epochs", "7", "--batch-size", "6", "--memory", "lean"]
    assert main(["train", "resnet18", str(data), *changes, "--log-dir", str(tmp_path / "log")]) == 0
    printed = capsys.readouterr().err
    for line in ("optimizer.schedule.epochs = 7", "optimizer.batch_size = 6", 'network.memory = "lean"'):
        assert f"{line}\n" in printed


def test_a_change_that_does_not_fit_is_an_error(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "revnet38_cifar", str(data), "--memory", "inplace", "--log-dir", str(tmp_path / "log")]) == 2
    assert 'network.memory = "inplace"' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18.a1_in1k"])
def test_the_default_log_folder_has_the_whole_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of timm that differ only behind the dot are not trained into one folder."""
    folders: list[Path] = []

    def train(self: Train, log_dir: Path) -> int:
        folders.append(log_dir)
        return 0

    monkeypatch.setattr(Train, "_train", train)
    assert main(["train", name, "data"]) == main(["train", f"folder/{name}.json", "data"]) == 0
    assert folders == [Path("runs") / name] * 2


@pytest.mark.parametrize(("name", "crop"), [("resnet18", 224), ("resnet32_cifar", 32), ("revnext", 32)])
def test_the_default_experiment_is_that_of_the_network_of_zoo_get(name: str, crop: int, data: Path) -> None:
    config = default_experiment(name, parse_data_path(data))
    assert (config.network.num_classes, config.input.crop_train, config.input.crop_val) == (2, crop, crop)
    assert parse_experiment(json.loads(config.model_dump_json()), "test") == config
    record = zoo.get(name, num_classes=2).built_as
    assert (record.norm, record.activation, record.activation_param) == ("standard", "leaky_relu", 0.01)
    assert (config.network.norm, config.network.activation, config.network.activation_param) == (
        record.norm, record.activation, record.activation_param,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet19", "there is no experiment, experiment file or architecture called resnet19; the nearest experiments "
                     "are .*resnet1.*, the nearest architectures resnet1"),
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
