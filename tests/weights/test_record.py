"""A weights file says which network it belongs to, and nothing in it that is wrong is believed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.weights.record import NetworkRecord, Preprocessing, record_in

import zoo
from zoo.config import parse_experiment
from zoo.convert import convert_norm
from zoo.errors import ConfigError, WeightsError
from zoo.limits import MAX_CLASSES
from zoo.registry import build_from_config
from zoo.weights import load_weights, read_state_dict, read_weights

RECORD = NetworkRecord(
    arch="resnet18",
    norm="standard",
    activation="relu",
    activation_param=0.01,
    classes=3,
    options={"dilation": [1, 1, 2, 4]},
    class_names=("cat", "dog", "ünicorn"),
    preprocessing=Preprocessing(scale=36, crop=32, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
)


def _changed(**changes: Any) -> dict[str, Any]:
    return {**RECORD.to_json(), **changes}


@pytest.fixture(scope="module")
def relu_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a ResNet-18 with relu and three classes, with their record."""
    path: Path = tmp_path_factory.mktemp("record") / "relu.pth"
    torch.manual_seed(0)
    model = zoo.get("resnet18", activation="relu", num_classes=3)
    torch.save({"state_dict": model.state_dict(), "network": _changed(options={})}, path)
    return path


def test_a_record_survives_a_file_that_holds_tensors_and_plain_values_alone(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "network": RECORD.to_json()}, tmp_path / "w.pth")
    content = torch.load(tmp_path / "w.pth", weights_only=True)
    assert record_in(content, "w.pth") == RECORD


def test_a_checkpoint_of_before_has_a_config_and_so_a_record() -> None:
    network: dict[str, Any] = {
        "arch": "resnext50",
        "bn_mode": "sync",
        "activation": "elu",
        "activation_param": 1.0,
        "classes": 7,
    }
    network = {**network, "input_3x3": True, "memory": "checkpoint"}
    settings = {"network": network, "input": {"scale_val": 36, "crop_val": 32}}
    config = parse_experiment(settings, "test").model_dump(mode="json")
    record = record_in({"state_dict": {}, "config": config}, "old.pth.tar")
    assert record is not None
    assert (record.arch, record.norm, record.activation, record.classes) == ("resnext50", "sync", "elu", 7)
    assert record.options == {"input_3x3": True, "memory": "checkpoint"}
    assert record.class_names is None
    assert record.preprocessing is not None
    assert (record.preprocessing.scale, record.preprocessing.crop) == (36, 32)


def test_settings_of_absurd_sizes_are_refused_as_records_are() -> None:
    config = {"network": {"arch": "revnext", "options": {"channels": 10**9}}}
    with pytest.raises(ConfigError, match=r"old.pth.tar: network\.options = .*1000000000"):
        record_in({"state_dict": {}, "config": config, "format_version": 1}, "old.pth.tar")


@pytest.mark.parametrize(
    "content",
    [
        {"conv.weight": torch.ones(1)},
        {"state_dict": {}},
        {"state_dict": {}, "config": {"lr": 0.1}},  # of another project's trainer
        {"state_dict": {}, "network": "resnet50"},
        {"network": {"conv.weight": torch.ones(1)}},
    ],
)
def test_files_of_others_have_no_record(content: dict[str, Any]) -> None:
    assert record_in(content, "w.pth") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "resnet19"}, r"network.arch = 'resnet19'.*resnet18"),
        ({"arch": 5}, "network.arch = 5"),
        ({"norm": "batch"}, "network.norm = 'batch'"),
        ({"activation": "gelu"}, "network.activation = 'gelu'"),
        ({"norm": "inplace"}, "network.activation = 'relu'.*inplace"),
        ({"activation_param": math.nan}, "network.activation_param = nan"),
        ({"activation_param": "0.01"}, "network.activation_param = '0.01'"),
        ({"activation": "elu", "activation_param": -1.0}, "network.activation_param = -1.0"),
        ({"classes": 10**12}, "network.classes = 1000000000000"),
        ({"classes": -1}, "network.classes = -1"),
        ({"classes": True}, "network.classes = True"),
        ({"class_names": ["a", "b\x1b[31m", "c"]}, r"network.class_names.*b\\x1b\[31m"),
        ({"class_names": ["a", "b", "a"]}, "network.class_names.*twice.*a"),
        ({"class_names": ["a", "b", 3]}, "network.class_names"),
        ({"class_names": ["a", "", "c"]}, "network.class_names"),
        ({"class_names": ["x" * 5000]}, "network.class_names"),
        ({"class_names": "abc"}, "network.class_names"),
        ({"class_names": [str(index) for index in range(1_000_000)]}, "network.class_names.*1,000,000.*3 classes"),
        ({"options": {"input_3x3": True}}, "network.options.*input_3x3"),
        ({"options": {"dilation": 10**9}}, "network.options.dilation"),
        ({"options": {"dilation": [1] * 10_000}}, "network.options.dilation"),
        ({"options": {"dilation": {"a": 1}}}, "network.options.dilation"),
        ({"options": []}, "network.options"),
        ({"preprocessing": {"scale": 36}}, "network.preprocessing"),
        ({"preprocessing": {"scale": 0, "crop": 32, "mean": [0.5] * 3, "std": [0.5] * 3}}, "network.preprocessing"),
        ({"preprocessing": {"scale": 36, "crop": 320, "mean": [0.5] * 3, "std": [0.5] * 3}}, "network.preprocessing"),
        ({"preprocessing": {"scale": 36, "crop": 32, "mean": [0.5] * 3, "std": [0.0] * 3}}, "network.preprocessing"),
        ({"preprocessing": {"scale": -1, "crop": 10**9, "mean": [0.5] * 3, "std": [0.5] * 3}}, "network.preprocessing"),
        ({"folded": 1}, "network.folded = 1"),
        ({"extra\n": 1}, r"network: .*extra\\n"),
        ({"x" * 10**6: 1}, r"network: .*xxx"),
        ({"classes": 10**5000}, r"network.classes = \(too long to show: int\)"),
        ({"activation_param": 10**5000}, "network.activation_param"),
        ({"options": {"dilation": {"a": 10**5000}}}, "network.options.dilation"),
        ({"class_names": ["a" * 2000, "a" * 2000]}, "network.class_names"),
    ],
)
def test_a_record_that_is_wrong_is_refused_with_file_and_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        record_in({"state_dict": {}, "network": _changed(**changes)}, "w.pth")
    assert str(caught.value).startswith("w.pth: ")
    assert len(str(caught.value)) < 1000


def test_a_record_that_lacks_a_key_is_refused() -> None:
    content = RECORD.to_json()
    del content["norm"]
    with pytest.raises(WeightsError, match=r"w.pth: network: .*norm"):
        NetworkRecord.from_json(content, "w.pth")


@pytest.mark.parametrize(("classes", "claimed"), [(3, MAX_CLASSES), (3, 0), (0, MAX_CLASSES)])
def test_a_record_cannot_claim_other_classes_than_the_file_has(classes: int, claimed: int, tmp_path: Path) -> None:
    """So that no file of a few bytes makes a reader build a classifier of gigabytes."""
    state_dict = {"classifier.fc.weight": torch.ones(classes, 2)} if classes else {"a": torch.ones(1)}
    record = _changed(classes=claimed, class_names=None)
    torch.save({"state_dict": state_dict, "network": record}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=f"w.pth: network.classes = {claimed}: .* {classes} "):
        read_weights(tmp_path / "w.pth").checked_spec()
    with pytest.raises(WeightsError, match=r"network\.classes"):
        zoo.get(tmp_path / "w.pth")


def test_names_that_no_terminal_could_show_are_kept_escaped() -> None:
    """A folder may be called anything; what is written has to be readable again."""
    experiment = parse_experiment({"network": {"classes": 3}}, "test")
    record = NetworkRecord.of_config(experiment.network, experiment.input, ["a", "b\n", "\udcff"])
    assert record.class_names == ("a", "b\\n", "\\udcff")
    assert NetworkRecord.from_json(record.to_json(), "w.pth") == record


def test_fewer_names_than_classes_are_kept_as_a_run_may_have_fewer_folders() -> None:
    experiment = parse_experiment({"network": {"classes": 5}}, "test")
    assert NetworkRecord.of_config(experiment.network, experiment.input, ["a", "b"]).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"activation": "leaky_relu"}, r"activation='relu' in the file.*activation='leaky_relu'.*relu-to-leaky-relu"),
        (
            {"activation": "leaky_relu", "bn_mode": "inplace"},
            r"norm='standard' in the file.*norm='inplace'.*relu-to-leaky-relu and then standard-to-inplace",
        ),
        ({"arch": "resnet34"}, r"arch='resnet18' in the file.*arch='resnet34'"),
    ],
)
def test_a_network_that_knows_what_it_is_takes_no_weights_of_another(
    network: dict[str, Any], message: str, relu_file: Path
) -> None:
    settings = {"arch": "resnet18", "activation": "relu", "classes": 3, **network}
    model = build_from_config(parse_experiment({"network": settings}, "test").network)
    with pytest.raises(WeightsError, match=message):
        load_weights(model, relu_file)
    if settings["arch"] == "resnet18":
        model.load_state_dict(read_state_dict(relu_file))  # who means it can


def test_what_changes_no_weights_is_no_contradiction(relu_file: Path, tmp_path: Path) -> None:
    model = zoo.get("resnet18", activation="relu", num_classes=3, memory="checkpoint", dilation=[1, 1, 1, 2])
    load_weights(model, relu_file)
    load_weights(zoo.get("resnet18", activation="relu", num_classes=7, keep_outputs=True), relu_file)
    source = zoo.get("resnet18", norm="sync", num_classes=3)
    record = _changed(norm="sync", activation="leaky_relu", options={})
    torch.save({"state_dict": source.state_dict(), "network": record}, tmp_path / "sync.pth")
    load_weights(zoo.get("resnet18", norm="inplace", num_classes=3), tmp_path / "sync.pth")


def test_the_parameter_of_an_activation_counts_where_there_is_one(tmp_path: Path, relu_file: Path) -> None:
    load_weights(zoo.get("resnet18", activation="relu", activation_param=0.2, num_classes=3), relu_file)
    source = zoo.get("resnet18", num_classes=3)
    record = _changed(activation="leaky_relu", activation_param=0.2, options={})
    torch.save({"state_dict": source.state_dict(), "network": record}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"activation_param=0.2 in the file.*activation_param=0.01"):
        load_weights(source, tmp_path / "w.pth")


def test_networks_of_unknown_origin_are_not_checked(relu_file: Path) -> None:
    """Own norms, and norms that were converted later: nobody knows what the file would have to say."""
    from zoo.layers import ABN

    model = zoo.get("resnet18", norm=lambda channels: ABN(channels, activation="relu"), num_classes=3)
    load_weights(model, relu_file)
    converted = convert_norm(zoo.get("resnet18", norm="inplace", num_classes=3), "standard")
    load_weights(converted, relu_file)


def test_a_folded_file_says_how_it_is_loaded(tmp_path: Path) -> None:
    record = _changed(folded=True, classes=0, class_names=None)
    torch.save({"state_dict": {"a": torch.ones(1)}, "network": record}, tmp_path / "f.pth")
    with pytest.raises(WeightsError, match="fold_network"):
        load_weights(zoo.get("resnet18"), tmp_path / "f.pth")
    with pytest.raises(WeightsError, match="fold_network"):
        zoo.get(tmp_path / "f.pth")


def test_a_published_name_has_a_record_without_a_file_that_says_so() -> None:
    record = NetworkRecord.of_published("resnext101_ipabn_lr_512")
    assert (record.arch, record.norm, record.activation, record.options) == (
        "resnext101", "inplace", "leaky_relu", {"input_3x3": True},
    )  # fmt: skip
    vistas = NetworkRecord.of_published("wider_resnet38_deeplab_vistas")
    assert (vistas.arch, vistas.norm, vistas.classes) == ("deeplab_wider_resnet38_a2", "inplace", 65)
    assert vistas.options == {"pooling_size": [84, 84]}
