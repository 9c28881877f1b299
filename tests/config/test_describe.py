"""The written form of the schema: nothing without a meaning, and defaults that are those of the code."""

from __future__ import annotations

import pytest

from zoo.config import (
    Experiment,
    describe_settings,
    differences,
    experiments_dir,
    load_experiment,
    parse_experiment,
)
from zoo.config.describe import SCHEDULE_PARAMS
from zoo.config.experiment import Score
from zoo.errors import ConfigError
from zoo.section import settings_of

SETTINGS = [(section.path, setting) for section in describe_settings() for setting in section.settings]


@pytest.mark.parametrize(("path", "setting"), SETTINGS, ids=lambda value: getattr(value, "key", value))
def test_every_setting_has_a_type_a_default_and_a_sentence_about_it(path, setting) -> None:
    assert setting.type
    assert setting.default
    assert setting.meaning.endswith(".")
    assert "``" not in setting.meaning


def test_every_field_of_every_section_is_described() -> None:
    described = {(section.path, setting.key) for section in describe_settings() for setting in section.settings}
    for section, path in [
        (Experiment, "the top level"),
        *((Experiment.model_fields[key].annotation, key) for key in ("network", "optimizer", "input", "training")),
        *((params, f'optimizer.schedule.params with type "{kind}"') for kind, params in SCHEDULE_PARAMS.items()),
        (Score, "expected.scores"),
    ]:
        for key, field in settings_of(section).items():
            assert field.description, f"{path}.{key}"
            assert (path, key) in described or hasattr(field.annotation, "model_fields")


def test_differences_are_what_makes_a_file_of_the_defaults() -> None:
    for path in experiments_dir().glob("*.json"):
        experiment = load_experiment(path)
        content: dict = {}
        for dotted, value in differences(experiment).items():
            *sections, key = dotted.split(".")
            node = content
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
        assert parse_experiment(content, "x.json").digest() == experiment.digest(), path.name
    assert differences(Experiment()) == {"network.arch": "resnet101", "network.norm": "standard"}


@pytest.mark.parametrize(
    "network",
    [
        {"arch": "resnet50", "norm": "standard"},
        {"arch": "revnet38_cifar", "norm": "standard", "num_classes": 1000},
        {"arch": "deeplab_resnet18", "num_classes": 19},
    ],
)
def test_a_copy_of_the_differences_is_not_read_as_an_earlier_version(network) -> None:
    experiment = parse_experiment({"network": network}, "x.json")
    shown = {key.removeprefix("network."): value for key, value in differences(experiment).items()}
    assert shown["norm"] == "standard"
    assert parse_experiment({"network": shown}, "copy.json").network == experiment.network


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ({"network": {"norm_layer": 1}}, "network.norm_layer = 1: unknown key; it is called network.norm"),
        ({"optimizer": {"lr": 1}}, "optimizer.lr = 1: unknown key; it is called optimizer.learning_rate"),
        ({"optimizer": {"epochs": 1}}, "optimizer.epochs = 1: unknown key; its place is optimizer.schedule.epochs"),
        ({"input": {"size": 1}}, "it is called input.crop_train (training) and input.crop_val with input.scale_val"),
        ({"training": {"batch_size": 1}}, "its place is optimizer.batch_size"),
        ({"clip": 1}, "its place is optimizer.clip"),
        ({"checkpoint": {"folder": 1}}, "unknown key; the keys of checkpoint are every_steps"),
        ({"colour": 1}, "unknown key; the keys of the top level are network, optimizer, input"),
        ({"optimizer": {"chanels_last": 1}}, "ema_warmup, ema_every, or training.channels_last"),
    ],
)
def test_an_unknown_key_is_told_where_what_it_may_mean_stands(content, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_experiment(content, "x.json")
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("content", "doubt"),
    [
        ({"input": {"crop_val": 32}}, "input.crop_val = 32: validation sees 1.6% of an image"),
    ],
)
def test_what_few_people_mean_is_doubted(content, doubt) -> None:
    (said,) = parse_experiment(content, "x.json").doubts()
    assert said.startswith(doubt)


def test_a_file_of_an_earlier_version_that_leaves_the_activation_out_is_warned_about(tmp_path, caplog) -> None:
    (tmp_path / "x.json").write_text('{"network": {"arch": "resnet18", "classes": 10}}')
    assert load_experiment(tmp_path / "x.json").network.activation == "relu"
    assert "network.activation is left out: it is relu, as in earlier versions" in caplog.text
    caplog.clear()
    (tmp_path / "x.json").write_text('{"network": {"arch": "resnet18", "num_classes": 10}}')
    assert load_experiment(tmp_path / "x.json").network.activation == "leaky_relu"
    assert not caplog.text


def test_a_bundled_experiment_is_found_by_its_name_and_a_file_by_its_path(tmp_path, monkeypatch) -> None:
    assert load_experiment("revnet38_cifar10") == load_experiment("revnet38_cifar10.json")
    path = tmp_path / "mine.json"
    path.write_text('{"seed": 3}')
    assert load_experiment(str(path)).seed == 3
    monkeypatch.chdir(tmp_path)
    assert load_experiment("mine.json").seed == 3
    with pytest.raises(ConfigError, match=r"give the path .* or a name; the nearest .* are revnet38_cifar10"):
        load_experiment("revnet38_cifar1")
