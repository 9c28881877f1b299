"""Settings are replaced one by one, and unknown options and arguments name the setting that was meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zoo
from tests.engine.tiny import make_images
from zoo.cli import main
from zoo.config.parse import load_experiment, parse_experiment, replace_settings
from zoo.config.setting_hints import COMMON_NAMES, hint_for
from zoo.errors import ConfigError
from zoo.registry.experiments import with_changes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=4, num_val=2)


HINTS = [
    ("--lr 0.1", "--set optimizer.learning_rate=VALUE"),
    ("--lr=0.1", "--set optimizer.learning_rate=VALUE"),
    ("--learning-rate 0.1", "--set optimizer.learning_rate=VALUE"),
    ("--momentum 0.8", "--set optimizer.momentum=VALUE"),
    ("--label-smoothing 0.1", "--set optimizer.label_smoothing=VALUE"),
    ("--num-classes 3", "--set network.num_classes=VALUE"),
    ("--pretrained", "--set network.options.pretrained=VALUE"),
    ("--amp", "--set training.amp=VALUE"),
    ("--device cpu", "CUDA_VISIBLE_DEVICES"),
    ("--crop 96", "--set input.crop_train=VALUE --set input.crop_val=VALUE"),
    ("--batch_size 4", "the nearest is --batch-size"),
]


@pytest.mark.parametrize(("option", "words"), HINTS)
def test_unknown_option_names_setting(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["train", "resnet18", "data", *option.split()])
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: zoo train ")
    assert words in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("validate resnet18 data --batchsize 3", "the nearest is --batch-size"),
        ("data check resnet18 data --worker_s 3", "the nearest is --workers"),
        ("list --no-such-thing", "unrecognized arguments: --no-such-thing"),
    ],
)
def test_unknown_option_of_any_command_shows_its_usage(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    printed = capsys.readouterr().err
    assert printed.startswith("usage: zoo " + " ".join(command.split()[: 2 if command.startswith("data") else 1]))
    assert words in printed


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("lr", r'settings=\{"optimizer.learning_rate": ...\}'),
        ("weight_decay", r'settings=\{"optimizer.weight_decay": ...\}'),
        ("amp", r'settings=\{"training.amp": ...\}'),
        ("pretrained", "weights"),
        ("device", "CUDA_VISIBLE_DEVICES"),
        ("epoch", "the nearest is epochs"),
    ],
)
def test_unknown_argument_names_setting(argument: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'; .*{words}"):
        zoo.train("resnet18", tmp_path, log_dir=tmp_path, **{argument: 1})


def test_names_in_other_trainers_stand_for_settings() -> None:
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.learning_rat=1", "optimizer.learning_rat = 1: .*nearest is optimizer.learning_rate"),
        ("optimizer.learning_rate=fast", 'optimizer.learning_rate = "fast": .*number'),
        ("seed.x=1", "seed.x: seed is a setting, not a section"),
        ("optimiser.type=SGD", "optimiser"),
    ],
)
def test_wrong_setting_is_named(
    change: str, words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "resnet32_cifar", str(data), "--log-dir", str(tmp_path / "log"), "--set", change]
    assert main(command) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "log").exists()


def test_setting_without_value_is_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "resnet18", "data", "--set", "optimizer.learning_rate"])
    assert "'optimizer.learning_rate' is not KEY=VALUE" in capsys.readouterr().err


def test_settings_in_python_lose_to_arguments() -> None:
    recipe = load_experiment("imagenet_resnet50_a1")
    changed = with_changes(recipe, 6, replaced={"optimizer.schedule.epochs": 7, "optimizer.ema_decay": None})
    assert (changed.optimizer.schedule.epochs, changed.optimizer.ema_decay) == (6, None)


def test_section_that_is_null_is_created() -> None:
    settings = parse_experiment({"network": {"arch": "deeplab_resnet18"}, "segmentation": {}}, "x").model_dump(
        mode="json"
    )
    replaced = replace_settings({**settings, "segmentation": None}, {"segmentation.layout": "vistas"})
    assert replaced["segmentation"] == {"layout": "vistas"}
    assert settings["segmentation"]["layout"] == "folders"
    with pytest.raises(ConfigError, match=r"segmentation\.ignore_label = -1"):
        parse_experiment(replace_settings(settings, {"segmentation.ignore_label": -1}), "x")
