"""The description of a network: what it accepts, in every place that has one."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.config.experiment import Experiment
from zoo.config.limits import MAX_CLASSES
from zoo.config.network import NetworkSpec, Preprocessing, escape_names, merge, parse_spec
from zoo.config.parse import parse_experiment
from zoo.errors import ConfigError, DataError, WeightsError
from zoo.weights.description import parse_description

ROOT = Path(__file__).parents[2]
STORED = {"arch": "resnet18", "norm": "standard", "activation": "relu", "activation_param": 0.01, "num_classes": 3,
          "options": {}, "class_names": ["cat", "dog", "ünicorn"]}  # fmt: skip


def stored_spec(network: dict[str, Any]) -> NetworkSpec | None:
    return parse_description({"state_dict": {}, "network": network}, "w.pth")[0]


def test_a_description_needs_no_torch() -> None:
    code = "import sys, zoo.config.published; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# What no description may say: settings, and words of the message. Experiments, weights files and zoo.get refuse it.
WRONG = [
    ({"norm": "batch"}, "norm"),
    ({"activation": "gelu"}, "activation"),
    ({"norm": "inplace", "activation": "relu"}, "activation.*has no inverse, which norm.*inplace"),
    ({"activation": "elu", "activation_param": 0}, "activation_param.*greater than 0 for elu"),
    ({"activation": "leaky_relu", "activation_param": -0.01}, "activation_param.*greater than 0"),
    ({"activation_param": math.nan}, "activation_param"),
    ({"activation_param": 1e308}, "activation_param"),
    ({"num_classes": -1}, "num_classes"),
    ({"num_classes": True}, "num_classes"),
    ({"num_classes": MAX_CLASSES + 1}, "num_classes"),
    ({"num_classes": 10**5000}, "num_classes"),
    ({"memory": "nonsense"}, "memory"),
    ({"weight_init": "xavier"}, "weight_init"),
    ({"weight_gain_multiplier": 0}, "weight_gain_multiplier"),
    ({"options": {"input_3x3": True}}, "input_3x3.* options are drop_path_rate, dilation"),
    ({"options": {"dilation": 0}}, "options.dilation = 0: should be a whole number from 1 to 1024, or a list"),
    ({"options": {"dilation": True}}, "options.dilation = true: should be a whole number"),
    ({"options": {"dilation": [1, 1, 1, [2, 0]]}}, "dilation.* should be a whole number"),
    ({"options": {"dilation": 10**9}}, "dilation.* should be a whole number"),
    ({"options": {"dilation": [1] * 10_000}}, "dilation.* should be a whole number|holds more than"),
    ({"options": {"grid_bits": 14}}, "grid_bits.*only sums, as of the reversible blocks of revnet.* divide"),
    ({"options": {"drop_path_rate": 1}}, "options.drop_path_rate = 1: should be less than or equal to 0.99"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_a_wrong_setting_is_refused_wherever_a_network_is_described(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_experiment({"network": {"arch": "resnet18", "activation": "elu", **settings}}, "x.json")
    with pytest.raises(WeightsError, match=f"w.pth: network.*{words}") as caught:
        stored_spec({**STORED, "activation": "elu", **settings})
    assert len(str(caught.value)) < 1000
    options = settings.get("options", {})
    with pytest.raises((ValueError, TypeError), match=words):
        zoo.get("resnet18", **{key: value for key, value in settings.items() if key != "options"}, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "resnet19"}, r"network.arch = 'resnet19'.*resnet18"),
        ({"arch": 5}, "network.arch = 5"),
        ({"arch": ""}, "network.arch"),
        ({"options": []}, "network.options"),
        ({"class_names": ["a", "b\x1b[31m", "c"]}, r"network.class_names\[1\].*a terminal can show"),
        ({"class_names": ["a", "b", "a"]}, "network.class_names.*twice.*a"),
        ({"class_names": ["a", "b", 3]}, r"network.class_names\[2\] = 3"),
        ({"class_names": ["a", "", "c"]}, r"network.class_names\[1\]"),
        ({"class_names": ["x" * 5000]}, r"network.class_names\[0\]"),
        ({"class_names": "abc"}, "network.class_names"),
        ({"class_names": ["a", "b", "c", "d"]}, "network.class_names.*4 names for 3 classes"),
        ({"class_names": [str(index) for index in range(1_000_000)]}, "network.class_names"),
        ({"preprocessing": {"scale_val": 0}}, "network.preprocessing.scale_val = 0"),
        (
            {"preprocessing": {"scale_val": 36, "crop_val": 320}},
            "network.preprocessing.crop_val = 320.*at most scale_val",
        ),
        ({"preprocessing": {"crop_val": 10**9}}, "network.preprocessing.crop_val"),
        ({"preprocessing": {"mean": [0.5, 0.5]}}, "network.preprocessing.mean"),
        ({"preprocessing": {"std": [0.5, 0.5, 0.0]}}, r"network.preprocessing.std\[2\]"),
        ({"extra\n": 1}, r"network.extra\\n"),
        ({"x" * 10**6: 1}, "network.xxx"),
        ({"options": {"dilation": {"a": 10**5000}}}, "network.options"),
    ],
)
def test_a_stored_description_that_is_wrong_is_refused_with_file_and_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        stored_spec({**STORED, **changes})
    assert str(caught.value).startswith("w.pth: ")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["arch", "norm", "activation", "activation_param", "options"])
def test_a_stored_description_that_lacks_a_key_is_refused(key: str) -> None:
    with pytest.raises(WeightsError, match=f"w.pth: network: lacks {key}"):
        stored_spec({other: value for other, value in STORED.items() if other != key})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"activation": "relu"}, "torchvision builds with its own layers .*; remove the key"),
        ({"weight_init": "torch"}, "remove the key"),
        ({"norm": "inplace"}, 'network.memory "lean"'),
        ({"memory": "checkpoint"}, "use one of auto, plain, lean"),
        ({"options": {"num_classes": 3}}, "set network.num_classes"),
        ({"options": {"name": "resnet34"}}, "set network.arch"),
        ({"options": {"weights": "DEFAULT"}}, "zoo train --weights FILE"),
        ({"options": {"pretrained": 1}}, "true or false, got 1"),
    ],
)
def test_options_that_an_external_network_lacks_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_spec({"arch": "torchvision:resnet18", **settings}, "x")


def test_relu_without_an_inverse_stands_in_one_place() -> None:
    """The rule that relu does not go with in-place norms is a validator of `NetworkSpec`."""
    rule = "has no inverse, which norm"
    assert [path.name for path in (ROOT / "zoo").rglob("*.py") if rule in path.read_text()] == ["network.py"]


def test_defaults_depend_on_the_architecture_and_are_the_same_in_python_and_json() -> None:
    assert [NetworkSpec(arch=arch).num_classes for arch in ("resnet18", "revnext", "deeplab_resnet18")] == [
        1000,
        10,
        19,
    ]
    assert NetworkSpec().activation == "leaky_relu"
    assert parse_experiment({"network": {"arch": "revnext", "norm": "standard"}}, "x").network == NetworkSpec(
        arch="revnext"
    )
    assert zoo.get("revnext").built_as.for_experiment() == NetworkSpec(arch="revnext")


def test_descriptions_are_merged_option_by_option_and_the_later_one_wins() -> None:
    merged = merge({"arch": "a", "norm": "sync", "options": {"x": 1, "y": 2}}, {"norm": "inplace", "y": 3})
    assert merged == {"arch": "a", "norm": "inplace", "options": {"x": 1, "y": 3}}


def test_facts_stored_in_files_are_not_experiment_settings() -> None:
    with pytest.raises(ConfigError, match=r"network\.class_names.*is stored with weights"):
        parse_experiment({"network": {"class_names": ["a"]}}, "x.json")
    assert not {"class_names", "preprocessing"} & Experiment().model_dump()["network"].keys()


def test_a_stored_file_is_read_back_unchanged() -> None:
    spec = parse_spec({"arch": "resnext50", "num_classes": 3, "options": {"dilation": (1, 1, 2, 4)}}, "x")
    spec = spec.described(Preprocessing(scale_val=36, crop_val=32), ["cat", "b\n", "\udcff"])
    assert spec.class_names == ["cat", "b\\n", "\\udcff"]
    assert stored_spec(json.loads(json.dumps(spec.model_dump(mode="json")))) == spec


def test_class_names_that_look_the_same_are_refused() -> None:
    with pytest.raises(DataError, match="look the same"):
        escape_names(["a\n", "a\\n"])


def test_keys_of_the_original_project_are_read() -> None:
    network = {"arch": "resnext50", "bn_mode": "sync", "classes": 3, "input_3x3": True, "dilation": [1, 1, 1, 2]}
    spec = parse_experiment({"network": network}, "x.json").network
    assert spec == NetworkSpec(
        arch="resnext50", norm="sync", num_classes=3, options={"input_3x3": True, "dilation": [1, 1, 1, 2]}
    )
    wider = {"arch": "wider_resnet38", "bn_mode": "inplace", "input_3x3": True, "dilation": 1}
    assert parse_experiment({"network": wider}, "x.json").network == NetworkSpec(arch="wider_resnet38", norm="inplace")
