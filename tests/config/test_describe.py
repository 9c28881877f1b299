"""The written form of the schema: nothing without a meaning, and defaults that are those of the code."""

from __future__ import annotations

import pytest

from zoo.config.describe import SCHEDULE_PARAMS, describe_settings
from zoo.config.experiment import Experiment, Score
from zoo.config.parse import load_experiment, parse_experiment
from zoo.config.section import settings_of
from zoo.errors import ConfigError


def test_every_setting_has_a_type_a_default_and_a_sentence_about_it() -> None:
    for setting in (setting for section in describe_settings() for setting in section.settings):
        assert setting.type, setting.name
        assert setting.default, setting.name
        assert setting.meaning.endswith("."), setting.name
        assert "``" not in setting.meaning, setting.name


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


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ({"network": {"nrom": 1}}, "network.nrom = 1: unknown key; the nearest is network.norm"),
        ({"optimizer": {"epochs": 1}}, "unknown key; the nearest is optimizer.schedule.epochs"),
        ({"clip": 1}, "clip = 1: unknown key; the nearest is optimizer.clip"),
        (
            {"network": {"bn_mod": "inplace"}},
            'bn_mod = "inplace": unknown key; the nearest is network.norm (alias bn_mode)',
        ),
        ({"network": {"clases": 3}}, "unknown key; the nearest is network.num_classes (alias classes)"),
        ({"network": {"leaky_relu_slop": 0.1}}, "the nearest is network.activation_param (alias leaky_relu_slope)"),
        ({"qqq": 1}, "qqq = 1: unknown key; zoo settings lists all"),
    ],
)
def test_an_unknown_key_is_reported_with_its_likely_place(content, hint) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_experiment(content, "x.json")
    assert hint in str(caught.value)


def test_a_bundled_experiment_is_found_by_its_name_and_a_file_by_its_path(tmp_path, monkeypatch) -> None:
    assert load_experiment("revnet38_cifar10") == load_experiment("revnet38_cifar10.json")
    path = tmp_path / "mine.json"
    path.write_text('{"seed": 3}')
    assert load_experiment(str(path)).seed == 3
    monkeypatch.chdir(tmp_path)
    assert load_experiment("mine.json").seed == 3
    with pytest.raises(ConfigError, match=r"give the path .* or a name; the nearest .* are revnet38_cifar10"):
        load_experiment("revnet38_cifar1")
