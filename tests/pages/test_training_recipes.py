"""The experiments of published recipes have the values that their sources state, one by one."""

from __future__ import annotations

import pytest

from tests.pages.training_recipes import CONVNEXT_COMMAND, RECIPES, SOURCES, Recipe, settings_of
from zoo.config import experiment_names, leaves, load_experiment

pytestmark = pytest.mark.pages

# What every recipe states, whether or not it is the default here.
STATED = {
    "network.arch", "optimizer.type", "optimizer.batch_size", "optimizer.learning_rate", "optimizer.weight_decay",
    "optimizer.clip", "optimizer.label_smoothing", "optimizer.schedule.type", "optimizer.schedule.mode",
    "optimizer.schedule.epochs", "input.crop_train", "input.interpolation_train", "input.scale_val", "input.crop_val",
}  # fmt: skip


def test_every_recipe_is_compared() -> None:
    assert sorted(recipe.name for recipe in RECIPES) == [name for name in experiment_names() if name[:8] == "imagenet"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_an_experiment_has_the_values_of_its_source_and_no_others(recipe: Recipe) -> None:
    experiment = load_experiment(recipe.name)
    settings, defaults = settings_of(recipe.name), dict(leaves(experiment.defaults().model_dump(mode="json")))
    stated = {row.key: row.value for row in recipe.rows}
    assert len(stated) == len(recipe.rows)
    assert stated.keys() >= STATED
    for key, value in stated.items():
        assert settings[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    own = {key for key, value in settings.items() if key in defaults and value != defaults[key]}
    params = {key for key in settings if key not in defaults}
    fixed = {key for key in params - stated.keys() if ".params." in key or "_params_" in key}
    assert own | params - fixed <= stated.keys() | {"network.num_classes"}
    assert {row.place for row in recipe.rows} <= SOURCES.keys()


def test_each_flag_of_the_command_of_timm_has_its_counterpart() -> None:
    settings = settings_of("imagenet_convnext_tiny")
    for flag, counterpart, value, _ in CONVNEXT_COMMAND:
        if value is None:
            assert counterpart not in settings
        else:
            assert settings[counterpart] == (pytest.approx(value) if isinstance(value, float) else value), flag
    experiment = load_experiment("imagenet_convnext_tiny")
    defaults = dict(leaves(experiment.defaults().model_dump(mode="json")))
    own = {key for key, value in settings.items() if key in defaults and value != defaults[key]}
    assert own <= {each.counterpart for each in CONVNEXT_COMMAND}
