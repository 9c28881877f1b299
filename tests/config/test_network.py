"""The description of a network: its defaults, merging, storing and reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.network import ExternalSpec, NetworkSpec, Spec, merge, parse_spec
from zoo.config.parse import parse_experiment
from zoo.config.record import NetworkRecord, Preprocessing, escape_names
from zoo.errors import DataError
from zoo.weights._description import parse_description

ROOT = Path(__file__).parents[2]


def test_relu_rule_has_one_definition() -> None:
    """Only a validator of `NetworkSpec` rejects relu with in-place norms."""
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
    assert zoo.get("revnext").built_as == NetworkSpec(arch="revnext")


def test_merge_is_per_option_and_later_one_wins() -> None:
    merged = merge({"arch": "a", "norm": "sync", "options": {"x": 1, "y": 2}}, {"norm": "inplace", "y": 3})
    assert merged == {"arch": "a", "norm": "inplace", "options": {"x": 1, "y": 3}}


def test_facts_stored_in_files_are_not_experiment_settings() -> None:
    assert not {"class_names", "preprocessing"} & Experiment().model_dump()["network"].keys()


def test_stored_file_is_read_back_unchanged() -> None:
    spec = parse_spec({"arch": "resnext50", "num_classes": 3, "options": {"dilation": (1, 1, 2, 4)}}, "x")
    names = escape_names(["cat", "b\n", "\udcff"])
    assert names == ["cat", "b\\n", "\\udcff"]
    record = NetworkRecord(spec=spec, preprocessing=Preprocessing(scale_val=36, crop_val=32), class_names=names)
    network = json.loads(json.dumps(record.content()))
    assert parse_description({"state_dict": {}, "network": network}, "w.pth")[0] == record


def test_class_names_that_look_the_same_raise() -> None:
    refused(DataError, lambda: escape_names(["a\n", "a\\n"]), "a\\n")


def test_keys_of_original_project_are_read() -> None:
    network = {"arch": "resnext50", "bn_mode": "sync", "classes": 3, "input_3x3": True, "dilation": [1, 1, 1, 2]}
    spec = parse_experiment({"network": network}, "x.json").network
    assert spec == NetworkSpec(
        arch="resnext50", norm="sync", num_classes=3, options={"input_3x3": True, "dilation": [1, 1, 1, 2]}
    )
    wider = {"arch": "wider_resnet38", "bn_mode": "inplace", "input_3x3": True, "dilation": 1}
    assert parse_experiment({"network": wider}, "x.json").network == NetworkSpec(arch="wider_resnet38", norm="inplace")


@pytest.mark.parametrize(
    ("network", "section"),
    [
        ({"arch": "resnet18", "norm": "sync"}, NetworkSpec),
        ({"arch": "deeplab_resnet18"}, NetworkSpec),
        ({"arch": "module:Mine"}, NetworkSpec),
        ({"arch": "revvit_s"}, Spec),
        ({"arch": "pyramid_revbifpn_s0", "num_classes": 3}, Spec),
        ({"arch": "timm:resnet18", "options": {"pretrained": True}}, ExternalSpec),
        ({"arch": "torchvision:resnet18", "memory": "lean"}, ExternalSpec),
    ],
)
def test_spec_has_only_settings_of_its_kind_of_network(network: dict[str, Any], section: type[Spec]) -> None:
    experiment = parse_experiment({"network": network}, "x")
    assert type(experiment.network) is section
    content = experiment.model_dump(mode="json")
    assert content["network"].keys() == section.model_fields.keys()
    assert parse_experiment(content, "x") == experiment


@pytest.mark.parametrize(
    ("section", "arch"), [(NetworkSpec, "revvit_s"), (Spec, "resnet18"), (NetworkSpec, "timm:a"), (ExternalSpec, "a")]
)
def test_spec_of_other_kind_of_network_raises(section: type[Spec], arch: str) -> None:
    refused(zoo.ConfigError, lambda: section(arch=arch), f'arch = "{arch}"', section.__name__)


def test_external_spec_knows_package_and_name() -> None:
    spec = ExternalSpec(arch="timm:resnet50.a1_in1k", options={"pretrained": True, "drop_rate": 0.1})
    assert (spec.package, spec.name) == ("timm", "resnet50.a1_in1k")
    assert spec.builder_arguments() == {"pretrained": True, "drop_rate": 0.1, "memory": "auto"}
    assert spec.changed(num_classes=3).without_pretrained().builder_arguments() == {
        "drop_rate": 0.1,
        "num_classes": 3,
        "memory": "auto",
    }


def test_other_number_of_classes_removes_class_names() -> None:
    record = NetworkRecord(spec=NetworkSpec(arch="resnet18", num_classes=2), class_names=["cat", "dog"])
    assert record.with_spec(record.spec.changed(norm="sync")).class_names == ["cat", "dog"]
    assert record.with_spec(record.spec.changed(num_classes=1)).class_names is None
