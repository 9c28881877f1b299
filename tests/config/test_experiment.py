"""The experiment schema: what is accepted, and that every fault is named with its place."""

import json
from typing import Any

import pytest

from zoo.config.experiment import check_world_size
from zoo.config.parse import parse_experiment
from zoo.errors import ConfigError


def problems_of(content: dict[str, Any]) -> list[str]:
    """Return the lines of the error that ``content`` gives, without the file's name; empty if it gives none."""
    try:
        parse_experiment(content, "x.json")
    except ConfigError as error:
        lines = str(error).splitlines()
        assert all(line.startswith("x.json: ") for line in lines)
        return [line.removeprefix("x.json: ") for line in lines]
    return []


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for the path "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("network.classes", True),
        ("network.norm", "ipabn"),
        ("training.gradient_angle_meter", True),
        ("optimizer.learning_rate", float("inf")),
        ("optimizer.type", "sgd"),
        ("optimizer.decay_biases", 0),
        ("input.pad_train", 2.0),
        ("seed", 2**32),
        ("network", []),
        ("input", None),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_itself(path: str, value: Any) -> None:
    (problem,) = problems_of(nested(path, value))
    assert problem.startswith(f"{path} = {json.dumps(value)}: ")


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ({"network": {"arch": "revnet56", "input_3x3": True}}, "network.options.input_3x3"),
        ({"network": {"arch": "wider_resnet38", "dilation": 2}}, "network.options.dilation"),
        ({"network": {"classes": 0}}, "network.num_classes"),
        ({"network": {"arch": "resnext50", "memory": "checkpoint_norms"}}, "network.memory"),
        ({"input": {"scale_val": 256, "crop_val": 320}}, "input.crop_val"),
        (
            {"input": {"scale_train": 4, "pad_train": 4, "pad_mode_train": "reflect", "crop_train": 8}},
            "input.pad_train",
        ),
        ({"input": {"crop_train": 32, "cutout_train": 33}}, "input.cutout_train"),
        (
            {"optimizer": {"schedule": {"type": "triangle", "params": {"peak_epoch": 5}}}},
            "optimizer.schedule.mode",
        ),
        (
            {
                "optimizer": {
                    "schedule": {"type": "triangle", "mode": "step", "params": {"peak_epoch": 5}, "warmup_epochs": 1}
                }
            },
            "optimizer.schedule.warmup_epochs",
        ),
        (
            {"optimizer": {"schedule": {"type": "triangle", "mode": "step", "params": {"peak_epoch": 10}}}},
            "optimizer.schedule.params.peak_epoch",
        ),
        ({"optimizer": {"nesterov": True, "momentum": 0}}, "optimizer.nesterov"),
        ({"optimizer": {"nesterov": True, "type": "Adam"}}, "optimizer.nesterov"),
        ({"optimizer": {"batch_size": 10, "accumulate_steps": 4}}, "optimizer.batch_size"),
        ({"optimizer": {"schedule": {"epochs": 4, "warmup_epochs": 4}}}, "optimizer.schedule.warmup_epochs"),
    ],
)
def test_an_invalid_combination_raises_an_error(content: dict[str, Any], path: str) -> None:
    (problem,) = problems_of(content)
    assert problem.startswith(f"{path} = ")


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


def test_sections_that_an_external_network_does_not_support_are_refused() -> None:
    network = {"arch": "timm:efficientnet_b0"}
    (problem,) = problems_of({"network": network, "optimizer": {"classifier_lr": 0.1}})
    assert problem.startswith("optimizer.classifier_lr = 0.1: ")
    (problem,) = problems_of({"network": network, "segmentation": {}})
    assert problem.startswith("segmentation: networks of other packages")


def test_the_settings_of_an_external_network_round_trip() -> None:
    network = {"arch": "timm:efficientnet_b0", "num_classes": 7, "memory": "lean", "options": {"drop_path_rate": 0.1}}
    experiment = parse_experiment({"network": network}, "x.json")
    content = experiment.model_dump(mode="json")
    assert content["network"] == network
    assert parse_experiment(content, "x.json") == experiment


def test_pretrained_weights_are_left_out_where_others_come_from_a_file() -> None:
    options = {"pretrained": True, "drop_path_rate": 0.1}
    content = {"network": {"arch": "timm:efficientnet_b0", "options": options}}
    network = parse_experiment(content, "x.json").network
    assert network.without_pretrained().options == {"drop_path_rate": 0.1}
    assert network.options == options


@pytest.mark.parametrize(
    ("kind", "params", "problem"),
    [
        ("step", {}, ".step_size: is missing"),
        ("step", {"step_size": 0}, ".step_size = 0: should be greater than 0"),
        ("step", {"step_size": 3, "gama": 1}, ".gama = 1: unknown key; the nearest is optimizer.schedule.params.gamma"),
        ("multistep", {"milestones": [5, 3]}, ".milestones = [5, 3]: should be in increasing order"),
        ("multistep", {"milestones": [5, True]}, ".milestones[1] = true: should be a valid integer"),
        ("constant", {"t_max": 3}, ".t_max = 3: unknown key; zoo settings lists all"),
        ("linear", 5, " = 5: should be a JSON object"),
    ],
)
def test_wrong_schedule_params_are_named(kind: str, params: Any, problem: str) -> None:
    content = {"optimizer": {"schedule": {"type": kind, "params": params}}}
    assert problems_of(content) == [f"optimizer.schedule.params{problem}"]


@pytest.mark.parametrize(
    ("batch_size", "accumulate_steps", "world_size", "choices"),
    [(256, 1, 3, "255 or 258"), (12, 2, 4, "8 or 16"), (2, 1, 3, "use 3")],
)
def test_an_indivisible_batch_is_refused_with_the_valid_batch_sizes(
    batch_size: int, accumulate_steps: int, world_size: int, choices: str
) -> None:
    content = {"optimizer": {"batch_size": batch_size, "accumulate_steps": accumulate_steps}}
    with pytest.raises(ConfigError, match=f"optimizer.batch_size = {batch_size}: .*{choices}"):
        check_world_size(parse_experiment(content, "x.json"), world_size)


@pytest.mark.parametrize(
    ("optimizer", "mixup", "world_size", "problem"),
    [
        ({"batch_size": 16, "replicas": 4}, 0.0, 5, r"optimizer\.replicas = 4, which 5 processes .* at most 4"),
        ({"batch_size": 16, "replicas": 3}, 0.0, 2, r"not a multiple of 3, optimizer\.replicas \(3\).*use 15 or 18"),
        ({"batch_size": 24, "replicas": 8, "accumulate_steps": 2}, 0.0, 1, "not a multiple of 16, .*use 16 or 32"),
        ({"batch_size": 12, "replicas": 4}, 0.2, 1, r"not a multiple of twice optimizer\.replicas \(4\).*use 8"),
    ],
)
def test_replicas_have_to_divide_the_batch_and_the_processes_the_replicas(
    optimizer: dict[str, Any], mixup: float, world_size: int, problem: str
) -> None:
    config = parse_experiment({"optimizer": optimizer, "regularization": {"mixup": mixup}}, "x.json")
    with pytest.raises(ConfigError, match=problem):
        check_world_size(config, world_size)


def test_any_number_of_processes_divides_the_replicas() -> None:
    config = parse_experiment({"optimizer": {"batch_size": 16, "replicas": 8}}, "x.json")
    for world_size in range(1, 9):
        check_world_size(config, world_size)


def test_all_wrong_values_are_reported_at_once_and_then_all_that_contradict_each_other() -> None:
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
