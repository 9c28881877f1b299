"""The description of a network: its defaults, merging, storing and reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import zoo
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec, Preprocessing, escape_names, merge, parse_spec
from zoo.config.parse import parse_experiment
from zoo.errors import DataError
from zoo.weights.description import parse_description

ROOT = Path(__file__).parents[2]


def test_description_does_not_import_torch() -> None:
    code = "import sys, zoo.config.published; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_relu_rule_has_one_definition() -> None:
    """The rule that relu does not go with in-place norms is a validator of `NetworkSpec`."""
    rule = "has no inverse, which norm"
    assert [path.name for path in (ROOT / "zoo").rglob("*.py") if rule in path.read_text()] == ["network.py"]


def test_defaults_are_the_same_in_python_and_json() -> None:
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


def test_merge_is_per_option_and_later_one_wins() -> None:
    merged = merge({"arch": "a", "norm": "sync", "options": {"x": 1, "y": 2}}, {"norm": "inplace", "y": 3})
    assert merged == {"arch": "a", "norm": "inplace", "options": {"x": 1, "y": 3}}


def test_facts_stored_in_files_are_not_experiment_settings() -> None:
    assert not {"class_names", "preprocessing"} & Experiment().model_dump()["network"].keys()


def test_stored_file_is_read_back_unchanged() -> None:
    spec = parse_spec({"arch": "resnext50", "num_classes": 3, "options": {"dilation": (1, 1, 2, 4)}}, "x")
    spec = spec.described(Preprocessing(scale_val=36, crop_val=32), ["cat", "b\n", "\udcff"])
    assert spec.class_names == ["cat", "b\\n", "\\udcff"]
    network = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert parse_description({"state_dict": {}, "network": network}, "w.pth")[0] == spec


def test_class_names_that_look_the_same_raise() -> None:
    with pytest.raises(DataError, match="look the same"):
        escape_names(["a\n", "a\\n"])


def test_keys_of_original_project_are_read() -> None:
    network = {"arch": "resnext50", "bn_mode": "sync", "classes": 3, "input_3x3": True, "dilation": [1, 1, 1, 2]}
    spec = parse_experiment({"network": network}, "x.json").network
    assert spec == NetworkSpec(
        arch="resnext50", norm="sync", num_classes=3, options={"input_3x3": True, "dilation": [1, 1, 1, 2]}
    )
    wider = {"arch": "wider_resnet38", "bn_mode": "inplace", "input_3x3": True, "dilation": 1}
    assert parse_experiment({"network": wider}, "x.json").network == NetworkSpec(arch="wider_resnet38", norm="inplace")
