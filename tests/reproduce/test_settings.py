"""The experiments and the networks have the settings that the papers print."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from zoo.config.architectures import architecture
from zoo.config.describe import leaves
from zoo.config.parse import experiment_names, load_experiment
from zoo.config.schedule import MIN_LINEAR_LR
from zoo.models.deeplab import HEAD_CHANNELS, HEAD_DILATIONS
from zoo.models.resnext import GROUPS

EPOCH = 50_000 // 100  # steps of an epoch of CIFAR with the batches of the RevNet paper
# Patterns of experiments, the place that prints their settings, and these settings.
PRINTED: list[tuple[str, str, dict[str, Any]]] = [
    ("resnext*_lr_*", "InPlace-ABN, section 4.1", {
        "network.activation_param": 0.01, "optimizer.type": "SGD", "optimizer.nesterov": True,
        "optimizer.learning_rate": 0.1, "optimizer.weight_decay": 1e-4, "optimizer.momentum": 0.9,
        "optimizer.schedule.type": "step", "optimizer.schedule.epochs": 90,
        "optimizer.schedule.params.step_size": 30, "optimizer.schedule.params.gamma": 0.1, "input.crop_train": 224,
        "input.scale_train": -1,  # the authors' code fixes no smallest side, the paper one of 256 pixels
    }),
    ("wider_resnet38_ipabn_lr_256", "InPlace-ABN, section 4.1", {
        "optimizer.learning_rate": 0.1, "optimizer.schedule.type": "linear", "optimizer.schedule.epochs": 90,
    }),
    ("cityscapes_*", "InPlace-ABN, section 4.2", {
        "optimizer.learning_rate": 2.5e-3, "optimizer.schedule.type": "polynomial", "optimizer.schedule.epochs": 360,
        "optimizer.schedule.params.power": 0.9, "optimizer.momentum": 0.9, "optimizer.weight_decay": 1e-4,
        "optimizer.nesterov": False, "optimizer.clip": 0,
        "segmentation.scale_range": [0.7, 2.0], "segmentation.hard_pixels": 0.25,
    }),
    ("coco_stuff_*", "InPlace-ABN, section 4.2", {"optimizer.schedule.epochs": 30}),
    ("vistas_*", "InPlace-ABN, section 4.2 and blog", {
        "optimizer.learning_rate": 3.5e-3, "optimizer.schedule.epochs": 90,
        "optimizer.batch_size": 4 * 3, "input.crop_train": 776,  # 3 crops on each of 4 GPUs
    }),
    *((f"{name}_cifar{classes}", "RevNet, section 7.1", {
        "optimizer.batch_size": 100, "optimizer.learning_rate": 0.1, "optimizer.weight_decay": 2e-4,
        "optimizer.momentum": 0.9, "optimizer.schedule.type": "multistep", "optimizer.schedule.mode": "epoch",
        "optimizer.schedule.epochs": 80_000 // EPOCH, "optimizer.schedule.params.gamma": 0.1,
        "optimizer.decay_norms": False, "optimizer.nesterov": False, "optimizer.clip": 0, "network.activation": "relu",
        "optimizer.schedule.params.milestones": [40_000 // EPOCH, 60_000 // EPOCH],
    }) for name in ("resnet32", "revnet38", "resnet110", "revnet110", "resnet164", "revnet164")
       for classes in (10, 100)),
    *((name, "RevNet, section 7.1 and Figure 3", {
        "optimizer.batch_size": 256, "optimizer.weight_decay": 1e-4, "optimizer.momentum": 0.9,
        "optimizer.decay_norms": False, "optimizer.nesterov": False, "optimizer.clip": 0, "network.activation": "relu",
        "optimizer.schedule.type": "multistep", "optimizer.schedule.mode": "step", "optimizer.schedule.epochs": 120,
        "optimizer.schedule.params.milestones": [160_000, 320_000, 480_000],  # out of 600K steps
        "optimizer.schedule.params.gamma": 0.1, "input.crop_train": 224,
        "input.mean": [0.5, 0.5, 0.5], "input.std": [0.5, 0.5, 0.5],  # [-1, 1] as in the code; the paper has [0, 1]
    }) for name in ("resnet101_preact", "revnet104")),
    ("resnet101_preact", "RevNet, section 7.1", {"optimizer.accumulate_steps": 2}),  # parts of 128 images
    *((f"{name}_cifar10", "RevNeXt, section 5", {
        "optimizer.batch_size": 512, "optimizer.learning_rate": 0.4, "optimizer.weight_decay": 5e-4,
        "optimizer.momentum": 0.9, "optimizer.nesterov": True, "optimizer.clip": 0, "optimizer.decay_norms": True,
        "optimizer.schedule.type": "triangle", "optimizer.schedule.mode": "step", "optimizer.schedule.epochs": 50,
        "optimizer.schedule.params.peak_epoch": 5, "network.activation_param": 0.2, "input.pad_train": 4,
        "input.pad_mode_train": "reflect", "input.crop_train": 32, "input.cutout_train": 8,
    }) for name in ("revnext", "revnext_flat", "irevnet_revnext", "revnext_resnet18", "revnext_revnet")),
]  # fmt: skip
# Table 2 of the RevNet paper: bottleneck, units, channels. It leaves out the stem's channels of ImageNet networks.
REVNET_TABLE_2 = {
    "resnet32_cifar": "No 5-5-5 16-16-32-64",
    "revnet38_cifar": "No 3-3-3 32-32-64-112",
    "resnet110_cifar": "No 18-18-18 16-16-32-64",
    "revnet110_cifar": "No 9-9-9 32-32-64-128",
    "resnet164_cifar": "Yes 18-18-18 16-16-32-64",
    "revnet164_cifar": "Yes 9-9-9 32-32-64-128",
    "resnet101_preact": "Yes 3-4-23-3 64-128-256-512",
    "revnet104": "Yes 2-2-11-2 128-256-512-832",
}


@pytest.mark.parametrize(("pattern", "place", "printed"), PRINTED, ids=[f"{row[0]}, {row[1]}" for row in PRINTED])
def test_experiments_have_printed_settings(pattern: str, place: str, printed: dict[str, Any]) -> None:
    names = [name for name in experiment_names() if fnmatchcase(name, pattern)]
    assert names
    for name in names:
        settings = dict(leaves(load_experiment(name).model_dump(mode="json", exclude={"expected"})))
        assert {key: settings[key] for key in printed} == printed, name


@pytest.mark.parametrize(("name", "row"), REVNET_TABLE_2.items())
def test_networks_have_published_structure(name: str, row: str) -> None:
    structure = architecture(name).structure
    widths = structure["widths"] if "cifar" in name else structure["widths"][1:]
    units, channels = ("-".join(map(str, each)) for each in (structure["structure"], widths))
    assert f"{'Yes' if structure['bottleneck'] else 'No'} {units} {channels}" == row


def test_constants_of_networks_and_schedules_equal_published_ones() -> None:
    """InPlace-ABN, sections 4.1 and 4.2: cardinality, end of the linear decay, dilations and channels of the head."""
    assert (GROUPS, MIN_LINEAR_LR) == (64, 1e-6)
    assert (HEAD_DILATIONS[8], HEAD_CHANNELS) == ((12, 24, 36), 256)
