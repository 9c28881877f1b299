"""The segmentation section: which networks have it, and its defaults."""

from typing import Any

import pytest

from zoo.config.parse import parse_experiment
from zoo.config.segmentation_section import Segmentation


def scenes(**sections: Any) -> dict[str, Any]:
    """Return the settings of a network that segments, with further sections or keys of its network."""
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": 11, **sections.pop("network", {})}
    return {"network": network, **sections}


@pytest.mark.parametrize("section", [{}, {"segmentation": {}}, {"segmentation": None}])
def test_segmentation_network_has_section_with_its_defaults(section: dict[str, Any]) -> None:
    config = parse_experiment(scenes(**section), "x.json")
    assert config.task == "segmentation"
    assert config.segmentation == Segmentation(scale_range=[0.7, 2.0], hard_pixels=0.25)
    assert (config.segmentation.layout, config.segmentation.ignore_label) == ("folders", 255)
    assert (config.segmentation.class_uniform, config.segmentation.longest_side_val) == (False, None)


def test_custom_network_segments_if_section_is_present() -> None:
    own = {"network": {"arch": "my_net", "classes": 3}}
    assert parse_experiment(own, "x.json").task == "classification"
    assert parse_experiment({**own, "segmentation": {}}, "x.json").task == "segmentation"
