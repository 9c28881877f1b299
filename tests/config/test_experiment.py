"""The experiment schema: which settings are accepted, and that all faults are reported at once."""

from typing import Any

import pytest

from tests.refusals import refused
from zoo.config.experiment import check_world_size
from zoo.config.parse import parse_experiment
from zoo.config.segmentation_section import Segmentation
from zoo.errors import ConfigError


def problems_of(content: dict[str, Any]) -> list[str]:
    """Return the lines of the error for ``content``, without the file's name; empty without error."""
    try:
        parse_experiment(content, "x.json")
    except ConfigError as error:
        lines = str(error).splitlines()
        assert all(line.startswith("x.json: ") for line in lines)
        return [line.removeprefix("x.json: ") for line in lines]
    return []


@pytest.mark.parametrize(
    "content",
    [
        {"input": {"scale_val": -1, "crop_val": 320}},
        {"input": {"scale_train": 36, "crop_train": 40}},
        {"network": {"arch": "resnext50", "input_3x3": True, "dilation": [1, 1, 2, 4]}},
        {"network": {"arch": "wider_resnet38_a2", "bn_mode": "sync", "activation": "elu", "memory": "checkpoint"}},
        {"network": {"arch": "resnet50", "memory": "checkpoint"}},
        {"network": {"arch": "revnet38_cifar", "memory": "lean"}},
        {"network": {"memory": "lean"}, "training": {"compile": True}},
        {"optimizer": {"nesterov": True, "momentum": 0.5}},
    ],
)
def test_unusual_but_valid_settings_are_accepted(content: dict[str, Any]) -> None:
    assert not problems_of(content)


def test_settings_of_external_network_round_trip() -> None:
    network = {"arch": "timm:efficientnet_b0", "num_classes": 7, "memory": "lean", "options": {"drop_path_rate": 0.1}}
    experiment = parse_experiment({"network": network}, "x.json")
    content = experiment.model_dump(mode="json")
    assert content["network"] == network
    assert parse_experiment(content, "x.json") == experiment


def test_pretrained_weights_are_replaced_by_weights_file() -> None:
    options = {"pretrained": True, "drop_path_rate": 0.1}
    content = {"network": {"arch": "timm:efficientnet_b0", "options": options}}
    network = parse_experiment(content, "x.json").network
    assert network.without_pretrained().options == {"drop_path_rate": 0.1}
    assert network.options == options


@pytest.mark.parametrize(
    ("batch_size", "accumulate_steps", "world_size", "choices"),
    [(256, 1, 3, "255 or 258"), (12, 2, 4, "8 or 16"), (2, 1, 3, "use 3")],
)
def test_indivisible_batch_raises_with_valid_batch_sizes(
    batch_size: int, accumulate_steps: int, world_size: int, choices: str
) -> None:
    content = {"optimizer": {"batch_size": batch_size, "accumulate_steps": accumulate_steps}}
    refused(
        ConfigError,
        lambda: check_world_size(parse_experiment(content, "x.json"), world_size),
        f"optimizer.batch_size = {batch_size}",
        choices,
    )


@pytest.mark.parametrize(
    ("optimizer", "mixup", "world_size", "names"),
    [
        ({"batch_size": 16, "replicas": 4}, 0.0, 5, ["optimizer.replicas = 4", "5 processes"]),
        ({"batch_size": 16, "replicas": 3}, 0.0, 2, ["multiple of 3", "optimizer.replicas (3)", "15 or 18"]),
        ({"batch_size": 24, "replicas": 8, "accumulate_steps": 2}, 0.0, 1, ["multiple of 16", "16 or 32"]),
        ({"batch_size": 12, "replicas": 4}, 0.2, 1, ["twice optimizer.replicas (4)", "use 8"]),
    ],
)
def test_invalid_number_of_replicas_raises(
    optimizer: dict[str, Any], mixup: float, world_size: int, names: list[str]
) -> None:
    config = parse_experiment({"optimizer": optimizer, "regularization": {"mixup": mixup}}, "x.json")
    refused(ConfigError, lambda: check_world_size(config, world_size), *names)


def test_processes_need_not_divide_replicas() -> None:
    config = parse_experiment({"optimizer": {"batch_size": 16, "replicas": 8}}, "x.json")
    for world_size in range(1, 9):
        check_world_size(config, world_size)


def test_all_wrong_values_and_then_all_conflicts_are_reported() -> None:
    content = {
        "network": {"nrom": "inplace", "classes": True},
        "optimizer": {"schedule": {"type": "step", "params": {"gamma": -1}}},
        "input": {"mean": [1, 2, "3"]},
        "expected": {"scores": {"center224": {"top5": 70}, "centre": {"top1": 1, "top5": 2}}},
        "sede": 1,
    }
    assert sorted(problem.split(" = ")[0].split(": ")[0] for problem in problems_of(content)) == [
        "expected.scores.centre",
        "expected.source",
        "input.mean[1]",
        "input.mean[2]",
        "network.classes",
        "network.nrom",
        "optimizer.schedule.params.gamma",
        "optimizer.schedule.params.step_size",
        "sede",
    ]
    optimizer = {"nesterov": True, "momentum": 0, "batch_size": 10, "accumulate_steps": 4}
    problems = problems_of({"optimizer": optimizer, "input": {"crop_val": 320, "pad_mode_train": "reflect"}})
    assert sorted(problem.split(" = ")[0] for problem in problems) == [
        "input.crop_val",
        "input.pad_mode_train",
        "optimizer.batch_size",
        "optimizer.nesterov",
    ]


@pytest.mark.parametrize("section", [{}, {"segmentation": {}}, {"segmentation": None}])
def test_segmentation_network_has_section_with_its_defaults(section: dict[str, Any]) -> None:
    network = {"arch": "deeplab_resnet18", "activation": "leaky_relu", "classes": 11}
    config = parse_experiment({"network": network, **section}, "x.json")
    assert config.task == "segmentation"
    assert config.segmentation == Segmentation(scale_range=[0.7, 2.0], hard_pixels=0.25)
    assert (config.segmentation.layout, config.segmentation.ignore_label) == ("folders", 255)
    assert (config.segmentation.class_uniform, config.segmentation.longest_side_val) == (False, None)


def test_custom_network_segments_if_section_is_present() -> None:
    own = {"network": {"arch": "my_net", "classes": 3}}
    assert parse_experiment(own, "x.json").task == "classification"
    assert parse_experiment({**own, "segmentation": {}}, "x.json").task == "segmentation"
