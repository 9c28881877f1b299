"""Single settings are replaced, and errors for unknown options and arguments name the intended setting."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.refusals import refused
from zoo.config.parse import load_experiment, parse_experiment, replace_settings
from zoo.config.setting_hints import COMMON_NAMES, hint_for
from zoo.errors import ConfigError
from zoo.registry.experiments import with_changes


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
    for name in (name for settings in COMMON_NAMES.values() for name in settings):
        inner = experiment
        *sections, key = name.split(".")
        for section in sections:
            inner = inner[section]
        assert key in inner, name
    assert hint_for("zzzzzz", ["epochs"], "--", str) == ""


def test_arguments_override_settings() -> None:
    recipe = load_experiment("imagenet_resnet50_a1")
    changed = with_changes(recipe, 6, replaced={"optimizer.schedule.epochs": 7, "optimizer.ema_decay": None})
    assert (changed.optimizer.schedule.epochs, changed.optimizer.ema_decay) == (6, None)


def test_fewer_epochs_than_warm_up_raise_with_valid_number() -> None:
    recipe = load_experiment("imagenet_convnext_tiny")
    refused(ConfigError, lambda: with_changes(recipe, epochs=1), "warmup_epochs = 20.0", "--epochs 21", "0.1")
    assert with_changes(recipe, epochs=21).optimizer.schedule.epochs == 21
    short = with_changes(recipe, epochs=1, replaced={"optimizer.schedule.warmup_epochs": 0.1})
    assert short.optimizer.schedule.warmup_epochs == 0.1


OF_SGD = {"optimizer": {"nesterov": True, "schedule": {"type": "step", "params": {"step_size": 3}}}}
OF_ADAM = {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9], "eps": 0.1}}}


@pytest.mark.parametrize(
    ("settings", "replaced", "expected"),
    [
        (OF_SGD, {"optimizer.type": "Adam"}, {"nesterov": False}),
        (OF_SGD, {"optimizer.type": "SGD"}, {"nesterov": True}),
        (OF_SGD, {"optimizer.nesterov": True, "optimizer.type": "Adam"}, "optimizer.nesterov = true"),
        (OF_ADAM, {"optimizer.type": "SGD"}, {"params": {}}),
        (OF_ADAM, {"optimizer.params.eps": 0.2, "optimizer.type": "RMSprop"}, {"params": {"alpha": 0.99, "eps": 0.2}}),
        (OF_ADAM, {"optimizer.params.eps": 0.2}, {"params": {"betas": [0.8, 0.9], "eps": 0.2}}),
        (OF_SGD, {"optimizer.type": "Adam", "optimizer": {"type": "SGD"}}, {"type": "Adam"}),
        (OF_SGD, {"optimizer.schedule.type": "constant"}, {"schedule.params": {}}),
        (OF_SGD, {"optimizer.schedule.type": "multistep"}, "optimizer.schedule.params.milestones: is missing"),
    ],
)
def test_other_type_resets_settings_of_former_type(
    settings: dict[str, Any], replaced: dict[str, Any], expected: dict[str, Any] | str
) -> None:
    change = partial(with_changes, parse_experiment(settings, "x"), replaced=replaced)
    if isinstance(expected, str):
        refused(ConfigError, change, expected)
        return
    optimizer = change().optimizer.model_dump(mode="json")
    optimizer["schedule.params"] = optimizer["schedule"]["params"]
    assert {key: optimizer[key] for key in expected} == expected


def test_null_section_is_created() -> None:
    settings = parse_experiment({"network": {"arch": "deeplab_resnet18"}, "segmentation": {}}, "x").model_dump(
        mode="json"
    )
    replaced = replace_settings({**settings, "segmentation": None}, {"segmentation.layout": "vistas"})
    assert replaced["segmentation"] == {"layout": "vistas"}
    assert settings["segmentation"]["layout"] == "folders"
    negative = replace_settings(settings, {"segmentation.ignore_label": -1})
    refused(ConfigError, lambda: parse_experiment(negative, "x"), "segmentation.ignore_label = -1")
