"""Wrong settings raise the same error in experiments, `zoo.train`, ``zoo train``, `zoo.get` and weights files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.refusals import refused
from zoo.cli import main
from zoo.config.limits import MAX_CLASSES
from zoo.config.parse import parse_experiment
from zoo.errors import ConfigError, WeightsError
from zoo.weights._description import parse_description

Door = Callable[[dict[str, Any], Path], str]

LACKS = "no such key"  # the value of a key that is left out
# The description of a network in a weights file.
STORED = {"arch": "resnet18", "norm": "standard", "activation": "elu", "activation_param": 0.01, "num_classes": 3,
          "options": {}}  # fmt: skip

# Settings of a network that replace the ones of `STORED`, and a pattern that the message contains.
NETWORK: list[tuple[dict[str, Any], str]] = [
    ({"norm": "batch"}, "norm"),
    ({"activation": "gelu"}, "activation"),
    ({"norm": "inplace", "activation": "relu"}, "activation.*has no inverse, which norm.*inplace"),
    ({"activation": "elu", "activation_param": 0}, "activation_param.*greater than 0 for elu"),
    ({"activation": "leaky_relu", "activation_param": -0.01}, "activation_param.*greater than 0"),
    ({"activation_param": math.nan}, "activation_param"),
    ({"activation_param": 1e308}, "activation_param"),
    ({"num_classes": -1}, "num_classes"),
    ({"num_classes": True}, "num_classes = (true|True): should be"),
    ({"num_classes": MAX_CLASSES + 1}, "num_classes"),
    ({"num_classes": 10**5000}, "num_classes"),
    ({"memory": "nonsense"}, "memory"),
    ({"arch": "resnext50", "memory": "checkpoint_norms"}, "memory"),
    ({"arch": "revnext", "memory": "checkpoint"}, "revnext has no such strategy; use one of auto, plain, lean"),
    ({"weight_init": "xavier"}, "weight_init"),
    ({"weight_gain_multiplier": 0}, "weight_gain_multiplier"),
    ({"options": {"input_3x3": True}}, "input_3x3.* options are drop_path_rate, dilation"),
    ({"options": {"dilation": 0}}, "options.dilation = 0: should be a whole number from 1 to 1024, or a list"),
    ({"options": {"dilation": True}}, "options.dilation = true: should be a whole number"),
    ({"options": {"dilation": 1.0}}, "options.dilation = 1.0: should be"),
    ({"options": {"dilation": [1, 2]}}, r"options.dilation = \[1, 2\]: should be"),
    ({"options": {"dilation": [1, 1, 1, [2, 0]]}}, "dilation.* should be a whole number"),
    ({"options": {"dilation": 10**9}}, "dilation.* should be a whole number"),
    ({"options": {"dilation": [1] * 10_000}}, "dilation.* should be a whole number|holds more than"),
    ({"arch": "resnet50", "options": {"dilation": [1, 1, [1] * 6, 1]}}, "options.dilation = .*: should be"),
    ({"arch": "resnext50", "options": {"dilation": [1, 1, [], 1]}}, "options.dilation = .*: should be"),
    ({"arch": "resnext50", "options": {"dilation": [[1, 1, 2]]}}, "options.dilation = .*: should be"),
    ({"arch": "resnext50", "options": {"dilation": [1, 1, [2], 1]}},
     r"options.dilation\[2\] = \[2\]: should have 6 numbers, one per block of mod4 of resnext50, got 1"),
    ({"arch": "resnext152", "options": {"dilation": [[1, 2, 3, 4], 1, 1, [2, 2, 2]]}},
     r"options.dilation\[0\] = \[1, 2, 3, 4\]: should have 3 numbers, one per block of mod2 of resnext152, got 4"),
    ({"arch": "densenet121", "options": {"dilation": [1, 1]}}, "options.dilation = .*: should be"),
    ({"arch": "wider_resnet16_a2", "options": {"dilation": "no"}}, 'options.dilation = "no": should be'),
    ({"options": {"grid_bits": 14}}, "grid_bits.*networks with grid_bits: revnet, "),
    ({"options": {"drop_path_rate": 1}}, "options.drop_path_rate = 1: should be less than or equal to 0.99"),
    ({"arch": "revnet38_cifar", "options": {"drop_path_rate": 0.1}}, "networks with drop_path_rate: resnet, "),
    ({"arch": "densenet121", "options": {"drop_path_rate": 0.1}}, "networks with drop_path_rate: resnet, "),
    ({"arch": "resnext50", "options": {"input_3x3": "no"}}, 'options.input_3x3 = "no": should be a valid boolean'),
    ({"arch": "revnext", "options": {"pools": ["channel", "mean"]}}, r'options.pools\[1\] = "mean": should be'),
    ({"arch": "revnext_flat", "options": {"eps_i": -1.0}}, r"options.eps_i = -1\.0"),
    ({"arch": "revnext_flat", "options": {"channels": 7}}, "options.channels = 7: should be a multiple of 2"),
    ({"arch": "irevnet_cifar", "options": {"width": 2}}, "options.width = 2: should be greater than or equal to 4"),
    ({"arch": "irevnet_cifar", "options": {"blocks": [1, 0, 1]}}, r"options.blocks\[1\] = 0: should be greater than"),
    ({"arch": "deeplab_resnet18", "options": {"output_stride": 32}}, "options.output_stride = 32: should be 8 or 16"),
    ({"arch": "deeplab_resnet18", "options": {"head_dilations": [12, 24]}}, "head_dilations.*at least 3 items"),
    ({"arch": "deeplab_resnet18", "options": {"pooling_size": [84, 0]}}, "pooling_size.* a whole number from 1"),
    ({"arch": "revvit_s", "norm": "inplace"}, "norm.*revvit_s, which has its own norms"),
    ({"arch": "revvit_s", "activation": "relu"}, "activation.*revvit_s, which has its own norms"),
    ({"arch": "revvit_s", "weight_init": "torch"}, "weight_init.*its own norms, activation and initial weights"),
    ({"arch": "revvit_s", "memory": "checkpoint"}, "no such strategy; use one of auto, plain, lean"),
]  # fmt: skip


def _optimizer(**settings: Any) -> dict[str, Any]:
    return {"optimizer": settings}


def _schedule(kind: str, params: Any, **settings: Any) -> dict[str, Any]:
    return _optimizer(schedule={"type": kind, "params": params, **settings})


def _external(**settings: Any) -> dict[str, Any]:
    return {"network": {"arch": "torchvision:resnet18", **settings}}


def _scenes(*, network: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    return {"network": {"arch": "deeplab_resnet18", "classes": 11, **(network or {})}, **sections}


UNKNOWN = "unknown key; the nearest is"
# An experiment, and a pattern of the beginning of the message after the name of the file.
EXPERIMENT: list[tuple[dict[str, Any], str]] = [
    ({"network": []}, r"network = \[\]: "),
    ({"input": None}, "input = null: "),
    ({"seed": 2**32}, f"seed = {2**32}: "),
    ({"clip": 1}, f"clip = 1: {UNKNOWN} optimizer.clip"),
    ({"qqq": 1}, "qqq = 1: unknown key; zoo settings lists all"),
    # network
    ({"network": {"classes": 0}}, "network.num_classes = 0: "),
    ({"network": {"classes": True}}, "network.classes = true: "),
    ({"network": {"norm": "ipabn"}}, 'network.norm = "ipabn": '),
    ({"network": {"nrom": 1}}, f"network.nrom = 1: {UNKNOWN} network.norm"),
    ({"network": {"bn_mod": "inplace"}}, rf'network.bn_mod = "inplace": {UNKNOWN} network.norm \(alias bn_mode\)'),
    ({"network": {"clases": 3}}, rf"network.clases = 3: {UNKNOWN} network.num_classes \(alias classes\)"),
    ({"network": {"leaky_relu_slop": 0.1}}, rf".*{UNKNOWN} network.activation_param \(alias leaky_relu_slope\)"),
    ({"network": {"class_names": ["a"]}}, r"network\.class_names.*is stored with weights"),
    ({"network": {"arch": "revnet56", "input_3x3": True}}, "network.options.input_3x3 = true: "),
    ({"network": {"arch": "wider_resnet38", "dilation": 2}}, "network.options.dilation = 2: "),
    ({"network": {"arch": "revvit_s", "norm": "standard"}}, "network.norm.*its own norms"),
    (_external(activation="relu"), "network.activation = .*torchvision builds with its own layers .*; remove the key"),
    (_external(weight_init="torch"), "network.weight_init = .*remove the key"),
    (_external(norm="inplace"), 'network.norm = .*network.memory "lean"'),
    (_external(memory="checkpoint"), "network.memory = .*use one of auto, plain, lean"),
    (_external(options={"num_classes": 3}), "network.options = .*set network.num_classes"),
    (_external(options={"name": "resnet34"}), "network.options = .*set network.arch"),
    (_external(options={"weights": "DEFAULT"}), "network.options = .*zoo train --weights FILE"),
    (_external(options={"pretrained": 1}), "network.options = .*pretrained must be true or false, got 1"),
    ({**_external(), "segmentation": {}}, "segmentation: networks of other packages"),
    # training, input
    ({"training": {"gradient_angle_meter": True}}, "training.gradient_angle_meter = true: "),
    ({"input": {"pad_train": 2.0}}, "input.pad_train = 2.0: "),
    ({"input": {"scale_val": 256, "crop_val": 320}}, "input.crop_val = 320: "),
    ({"input": {"scale_train": 4, "pad_train": 4, "pad_mode_train": "reflect", "crop_train": 8}}, "input.pad_train = "),
    ({"input": {"crop_train": 32, "cutout_train": 33}}, "input.cutout_train = 33: "),
    # optimizer
    (_optimizer(learning_rate=math.inf), "optimizer.learning_rate = Infinity: "),
    (_optimizer(decay_biases=0), "optimizer.decay_biases = 0: "),
    (_optimizer(epochs=1), f"optimizer.epochs = 1: {UNKNOWN} optimizer.schedule.epochs"),
    (_optimizer(type="sgd"), 'optimizer.type = "sgd": should be one of SGD, Adam, .*, or timm:NAME'),
    (_optimizer(type="SGD", params={"betas": [0.9, 0.99]}), ".*betas = .*: unknown key; zoo settings lists all"),
    (_optimizer(type="AdamW", params={"beta": [0.9]}), f"optimizer.params.beta = .*: {UNKNOWN} optimizer.params.betas"),
    (_optimizer(type="AdamW", params={"betas": [0.9, 1.5]}), "optimizer.params.*less than 1"),
    (_optimizer(type="AdamW", nesterov=True), "optimizer.nesterov = true: .*AdamW takes no such setting"),
    (_optimizer(nesterov=True, momentum=0), "optimizer.nesterov = true: "),
    (_optimizer(release_gradients=True), "optimizer.clip = 1.0: .*release_gradients"),
    (_optimizer(release_gradients=True, clip=0, replicas=2), "optimizer.replicas = 2: .*release_gradients"),
    (
        {"optimizer": {"release_gradients": True, "clip": 0}, "training": {"amp": "fp16"}},
        'training.amp = "fp16": .*release_gradients',
    ),
    (_optimizer(batch_size=10, accumulate_steps=4), "optimizer.batch_size = 10: "),
    # optimizer.schedule
    (_optimizer(schedule={"epochs": 4, "warmup_epochs": 4}), "optimizer.schedule.warmup_epochs = "),
    (_schedule("triangle", {"peak_epoch": 5}), "optimizer.schedule.mode = "),
    (_schedule("triangle", {"peak_epoch": 5}, mode="step", warmup_epochs=1), "optimizer.schedule.warmup_epochs = "),
    (_schedule("triangle", {"peak_epoch": 10}, mode="step"), "optimizer.schedule.params.peak_epoch = "),
    (_schedule("step", {}), "optimizer.schedule.params.step_size: is missing$"),
    (_schedule("step", {"step_size": 0}), "optimizer.schedule.params.step_size = 0: should be greater than 0"),
    (_schedule("step", {"step_size": 3, "gama": 1}),
     f"optimizer.schedule.params.gama = 1: {UNKNOWN} optimizer.schedule.params.gamma$"),
    (_schedule("multistep", {"milestones": [5, 3]}), r".*params.milestones = \[5, 3\]: should be in increasing order$"),
    (_schedule("multistep", {"milestones": [5, True]}), r".*milestones\[1\] = true: should be a valid integer"),
    (_schedule("constant", {"t_max": 3}), ".*params.t_max = 3: unknown key; zoo settings lists all"),
    (_schedule("linear", 5), "optimizer.schedule.params = 5: should be a JSON object"),
    # segmentation
    (_scenes(segmentation={"layout": "ade20k"}), 'segmentation.layout = "ade20k": should be '),
    (_scenes(segmentation={"ignore_label": -1}), "segmentation.ignore_label = -1: should be greater"),
    (_scenes(segmentation={"scale_range": [2.0, 0.7]}), r"segmentation.scale_range = \[2.0, 0.7\]: should be the"),
    (_scenes(segmentation={"hard_pixels": 0}), "segmentation.hard_pixels = 0: should be greater than 0"),
    (_scenes(segmentation={"ignore_label": 10}), "network.num_classes = 11: the outputs are the labels 0 to 10"),
    (_scenes(network={"classes": 1000}), "network.num_classes = 1000: the outputs are"),
    (_scenes(input={"scale_val": 300}), "input.scale_val = 300: is not used in segmentation; remove the key"),
    (_scenes(input={"pad_train": 4}), "input.pad_train = 4: is not used in segmentation"),
    ({"segmentation": {}}, "segmentation: resnet101 is a classifier; remove the section"),
    ({"hard_pixels": 1}, f"hard_pixels = 1: {UNKNOWN} segmentation.hard_pixels"),
]  # fmt: skip


# Descriptions that only weights files have, as in `NETWORK`.
WEIGHTS: list[tuple[dict[str, Any], str]] = [
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
    ({"preprocessing": {"scale_val": 36, "crop_val": 320}}, "preprocessing.crop_val = 320.*at most scale_val"),
    ({"preprocessing": {"crop_val": 10**9}}, "network.preprocessing.crop_val"),
    ({"preprocessing": {"mean": [0.5, 0.5]}}, "network.preprocessing.mean"),
    ({"preprocessing": {"std": [0.5, 0.5, 0.0]}}, r"network.preprocessing.std\[2\]"),
    ({"extra\n": 1}, r"network.extra\\n"),
    ({"x" * 10**6: 1}, "network.xxx"),
    ({"options": {"dilation": {"a": 10**5000}}}, "network.options"),
    *((dict.fromkeys([key], LACKS), f"network: lacks {key}") for key in STORED if key != "num_classes"),
]


def from_parse_experiment(content: dict[str, Any], folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_experiment(content, "x.json")
    return str(caught.value).removeprefix("x.json: ")


def from_train(content: dict[str, Any], folder: Path) -> str:
    (folder / "x.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        zoo.train(folder / "x.json", folder, log_dir=folder / "log")
    assert not (folder / "log").exists()
    return str(caught.value).removeprefix(f"{folder / 'x.json'}: ")


def from_command(content: dict[str, Any], folder: Path) -> str:
    (folder / "x.json").write_text(json.dumps(content))
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        assert main(["train", str(folder / "x.json"), str(folder), "--log-dir", str(folder / "log")]) == 2
    assert not (folder / "log").exists()
    return printed.getvalue().strip().removeprefix(f"zoo train: {folder / 'x.json'}: ")


def from_section(settings: dict[str, Any], folder: Path) -> str:
    message = from_parse_experiment({"network": STORED | settings}, folder)
    assert message.startswith("network.")
    return message


def from_weights(settings: dict[str, Any], folder: Path) -> str:
    network = {key: value for key, value in (STORED | settings).items() if value != LACKS}
    message = refused(WeightsError, lambda: parse_description({"state_dict": {}, "network": network}, "w.pth"))
    assert message.startswith("w.pth: ")
    return message.removeprefix("w.pth: ")


def from_get(settings: dict[str, Any], folder: Path) -> str:
    settings = {"arch": "resnet18", **settings}
    options = settings.pop("options", {})
    if settings["arch"] != "revvit_s":
        settings.setdefault("activation", "elu")
    with pytest.raises((ConfigError, TypeError)) as caught, torch.device("meta"):
        zoo.get(settings.pop("arch"), **settings, **options)
    return str(caught.value)


@pytest.mark.parametrize("door", [from_parse_experiment, from_train, from_command])
@pytest.mark.parametrize(("content", "words"), EXPERIMENT)
def test_wrong_experiment_raises(door: Door, content: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = door(content, tmp_path)
    assert re.match(words, message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("door", "settings", "words"),
    [
        *((door, *row) for row in NETWORK for door in (from_section, from_get, from_weights)),
        *((from_weights, *row) for row in WEIGHTS),
    ],
)
def test_wrong_network_raises(door: Door, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = door(settings, tmp_path)
    assert re.search(words, message)
    assert len(message) < 1000
