"""Single settings can be replaced, and errors for unknown options and arguments name the intended setting."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import zoo
from tests.engine.tiny import make_images
from tests.refusals import refused
from zoo.cli import main
from zoo.config.parse import load_experiment, parse_experiment, replace_settings
from zoo.config.setting_hints import COMMON_NAMES, hint_for
from zoo.errors import ConfigError
from zoo.registry.experiments import with_changes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=4, num_val=2)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("lr", 'settings={"optimizer.learning_rate": ...}'),
        ("weight_decay", 'settings={"optimizer.weight_decay": ...}'),
        ("amp", 'settings={"training.amp": ...}'),
        ("device", "CUDA_VISIBLE_DEVICES"),
        ("epoch", "epochs"),
    ],
)
def test_unknown_argument_names_setting(argument: str, hint: str, tmp_path: Path) -> None:
    train = partial(zoo.train, "resnet18", tmp_path, log_dir=tmp_path, **{argument: 1})
    refused(TypeError, train, f"unexpected keyword argument '{argument}'; ", hint)


def test_names_from_other_trainers_suggest_settings() -> None:
    experiment = load_experiment("imagenet_resnet50_a1").model_dump(mode="json")
    for settings in COMMON_NAMES.values():
        for name in settings:
            section, _, key = name.rpartition(".")
            inner = experiment
            for part in section.split("."):
                inner = inner[part]
            assert key in inner, name
    assert hint_for("zzzzzz", ["epochs"], "--", str) == ""


@pytest.mark.parametrize("name", ["resnet32_cifar", "resnet32_cifar10"])
def test_set_replaces_settings_of_architectures_and_experiments(name: str, data: Path, tmp_path: Path) -> None:
    command = ["train", name, str(data), "--log-dir", str(tmp_path / "log"), "-j", "0", "--epochs", "1"]
    changes = [
        "optimizer.learning_rate=0.5",
        "optimizer.schedule.type=constant",
        "optimizer.schedule.params={}",
        "network.classes=2",
        "network.memory=plain",
        "input.mean=[0, 0, 0]",
        "input.scale_train=32",
        "input.scale_val=32",
        "training.channels_last=true",
    ]
    assert main([*command, *(word for change in changes for word in ("--set", change))]) == 0
    found = load_experiment(tmp_path / "log" / "experiment.json")
    assert (found.optimizer.learning_rate, found.optimizer.schedule.type) == (0.5, "constant")
    assert (found.network.num_classes, found.network.memory, found.input.mean) == (2, "plain", [0, 0, 0])
    assert found.training.channels_last
    assert found.optimizer.schedule.epochs == 1


def test_arguments_override_settings_in_python() -> None:
    recipe = load_experiment("imagenet_resnet50_a1")
    changed = with_changes(recipe, 6, replaced={"optimizer.schedule.epochs": 7, "optimizer.ema_decay": None})
    assert (changed.optimizer.schedule.epochs, changed.optimizer.ema_decay) == (6, None)


def test_null_section_is_created() -> None:
    settings = parse_experiment({"network": {"arch": "deeplab_resnet18"}, "segmentation": {}}, "x").model_dump(
        mode="json"
    )
    replaced = replace_settings({**settings, "segmentation": None}, {"segmentation.layout": "vistas"})
    assert replaced["segmentation"] == {"layout": "vistas"}
    assert settings["segmentation"]["layout"] == "folders"
    negative = replace_settings(settings, {"segmentation.ignore_label": -1})
    refused(ConfigError, lambda: parse_experiment(negative, "x"), "segmentation.ignore_label = -1")
