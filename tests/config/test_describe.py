"""The description of the schema explains every setting and has the defaults of the code."""

from __future__ import annotations

from tests.refusals import refused
from zoo.config.describe import SCHEDULE_PARAMS, describe_settings
from zoo.config.experiment import Experiment, Score
from zoo.config.parse import load_experiment
from zoo.config.section import inner_section, settings_of
from zoo.errors import ConfigError

SECTIONS = ("network", "optimizer", "input", "training")


def test_every_setting_has_type_default_and_description() -> None:
    for setting in (setting for section in describe_settings() for setting in section.settings):
        assert setting.type, setting.name
        assert setting.default, setting.name
        assert setting.meaning.endswith("."), setting.name
        assert "``" not in setting.meaning, setting.name


def test_every_field_of_every_section_is_described() -> None:
    described = {(section.path, setting.key) for section in describe_settings() for setting in section.settings}
    for section, path in [
        (Experiment, "the top level"),
        *((inner_section(Experiment.model_fields[key].annotation), key) for key in SECTIONS),
        *((params, f'optimizer.schedule.params with type "{kind}"') for kind, params in SCHEDULE_PARAMS.items()),
        (Score, "expected.scores"),
    ]:
        for key, field in settings_of(section).items():
            assert field.description, f"{path}.{key}"
            assert (path, key) in described or key in SECTIONS or hasattr(field.annotation, "model_fields")


def test_experiments_are_found_by_name_or_path(tmp_path, monkeypatch) -> None:
    assert load_experiment("revnet38_cifar10") == load_experiment("revnet38_cifar10.json")
    path = tmp_path / "mine.json"
    path.write_text('{"seed": 3}')
    assert load_experiment(str(path)).seed == 3
    monkeypatch.chdir(tmp_path)
    assert load_experiment("mine.json").seed == 3
    refused(ConfigError, lambda: load_experiment("revnet38_cifar1"), "revnet38_cifar10")
