"""The segmentation section: which networks have it, what it refuses, and that classification does not notice it."""

from typing import Any

import pytest

from tests.config.test_experiment import problems_of
from zoo.config.parse import parse_experiment
from zoo.config.segmentation_section import Segmentation


def scenes(**sections: Any) -> dict[str, Any]:
    """Return the settings of a network that segments, with further sections or keys of its network."""
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": 11, **sections.pop("network", {})}
    return {"network": network, **sections}


@pytest.mark.parametrize("section", [{}, {"segmentation": {}}, {"segmentation": None}])
def test_a_segmentation_network_has_the_section_with_its_defaults(section: dict[str, Any]) -> None:
    config = parse_experiment(scenes(**section), "x.json")
    assert config.task == "segmentation"
    assert config.segmentation == Segmentation(scale_range=[0.7, 2.0], hard_pixels=0.25)
    assert (config.segmentation.layout, config.segmentation.ignore_label) == ("folders", 255)
    assert (config.segmentation.class_uniform, config.segmentation.longest_side_val) == (False, None)


def test_a_custom_network_segments_if_the_section_is_present() -> None:
    own = {"network": {"arch": "my_net", "classes": 3}}
    assert parse_experiment(own, "x.json").task == "classification"
    assert parse_experiment({**own, "segmentation": {}}, "x.json").task == "segmentation"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (scenes(segmentation={"layout": "ade20k"}), 'segmentation.layout = "ade20k": should be '),
        (scenes(segmentation={"ignore_label": -1}), "segmentation.ignore_label = -1: should be greater"),
        (scenes(segmentation={"scale_range": [2.0, 0.7]}), "segmentation.scale_range = [2.0, 0.7]: should be the"),
        (scenes(segmentation={"hard_pixels": 0}), "segmentation.hard_pixels = 0: should be greater than 0"),
        (
            scenes(segmentation={"ignore_label": 10}),
            "network.num_classes = 11: the outputs are the labels 0 to 10",
        ),
        (scenes(network={"classes": 1000}), "network.num_classes = 1000: the outputs are"),
        (scenes(input={"scale_val": 300}), "input.scale_val = 300: is not used in segmentation; remove the key"),
        (scenes(input={"pad_train": 4}), "input.pad_train = 4: is not used in segmentation"),
        (scenes(optimizer={"classifier_lr": 0.1}), "optimizer.classifier_lr = 0.1: is not used in segmentation"),
        ({"segmentation": {}}, "segmentation: resnet101 is a classifier; remove the section"),
        ({"hard_pixels": 1}, "hard_pixels = 1: unknown key; the nearest is segmentation.hard_pixels"),
    ],
)
def test_settings_that_segmentation_does_not_support_are_named(content: dict[str, Any], problem: str) -> None:
    (said,) = problems_of(content)
    assert said.startswith(problem)
