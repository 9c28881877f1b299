"""The bundled experiment files and the index of published weights say the same as the original project."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from zoo.config import Experiment, experiments_dir, load_experiment, parse_experiment
from zoo.config.published import Published, published
from zoo.registry import build_from_config

CLASSIFIERS = [entry for entry in published().values() if entry.experiment.task == "classification"]

# name, architecture, bn_mode, 3x3 stem, batch, learning rate, centre 224, ten crops 224, centre 320, md5:
# section "ImageNet results" of the original project's README, and its experiment files.
ORIGINAL = """
resnext101_stdbn_lr_256 resnext101 standard True 256 0.1 77.04/93.50 78.72/94.47 77.92/94.28 448438885986d14db5e870b95f814f91
resnext101_ipabn_lr_512 resnext101 inplace True 512 0.1 78.08/93.79 79.52/94.66 79.38/94.67 3b7a221cbc076410eb12c8dd361b7e4e
resnext152_ipabn_lr_256 resnext152 inplace True 256 0.1 78.28/94.04 79.73/94.82 79.56/94.67 2c8d572587961ed74611d534c5b2e9ce
wider_resnet38_ipabn_lr_256 wider_resnet38 inplace True 256 0.1 79.72/94.78 81.03/95.43 80.69/95.27 1c085ab70b789cc1d6c1594f7a761007
resnext101_ipabn-sync_lr_256 resnext101 sync True 256 0.1 77.70/93.78 79.18/94.60 78.98/94.56 0a85a21847b15e5a242e17bf3b753849
densenet264_ipabn_lr_256 densenet264 inplace True 256 0.1 78.57/94.17 79.72/94.93 79.49/94.89 0b413d67b725619441d0646d663865bf
resnet50_ipabn-sync_lr_512 resnet50 sync False 512 0.2 75.53/92.59 77.04/93.57 76.60/93.49 2522ca639f7fdfd7c0089ba1f5f6c2e8
resnet34_ipabn-sync_lr_512 resnet34 sync False 512 0.2 73.27/91.34 75.19/92.66 74.87/92.42 61515c1484911c3cc753d405131e1dda
resnet101_ipabn-sync_lr_512 resnet101 sync False 512 0.2 77.07/93.45 78.58/94.40 78.25/94.19 1552ae0f3d610108df702135f56bd27b
""".strip().splitlines()  # noqa: E501


def experiment_of(name: str) -> Experiment:
    return load_experiment(experiments_dir() / f"{name}.json")


def scores_of(experiment: Experiment) -> dict[str, dict[str, float]]:
    assert experiment.expected is not None
    return {protocol: score.model_dump(exclude_none=True) for protocol, score in experiment.expected.scores.items()}


@pytest.mark.parametrize("line", ORIGINAL, ids=lambda line: line.split()[0])
def test_a_published_experiment_has_the_published_settings_and_scores(line: str) -> None:
    name, arch, bn_mode, input_3x3, batch_size, learning_rate, *columns, md5 = line.split()
    experiment = experiment_of(name)
    network, optimizer = experiment.network, experiment.optimizer
    assert (network.arch, network.norm) == (arch, bn_mode)
    # The original file of the WiderResNet asks for a stem that no WiderResNet has.
    assert network.options == ({"input_3x3": True} if input_3x3 == "True" and arch != "wider_resnet38" else {})
    assert (network.activation, network.activation_param, network.num_classes) == ("leaky_relu", 0.01, 1000)
    assert (network.weight_init, network.weight_gain_multiplier) == ("xavier_normal", 1)
    assert (optimizer.batch_size, optimizer.learning_rate) == (int(batch_size), float(learning_rate))
    assert (optimizer.type, optimizer.momentum, optimizer.weight_decay) == ("SGD", 0.9, 1e-4)
    assert (optimizer.nesterov, optimizer.clip, optimizer.schedule.epochs) == (True, 0, 90)
    assert (experiment.input.color_jitter_train, experiment.input.lighting_train) == (True, True)
    assert experiment.expected is not None
    assert published()[name].md5 == md5
    protocols = ("center224", "tencrop224", "center320")
    scores = [dict(zip(("top1", "top5"), map(float, column.split("/")), strict=True)) for column in columns]
    assert scores_of(experiment) == dict(zip(protocols, scores, strict=True))


@pytest.mark.parametrize("entry", CLASSIFIERS, ids=lambda entry: entry.name)
def test_a_published_schedule_is_that_of_its_network(entry: Published) -> None:
    schedule = experiment_of(entry.name).optimizer.schedule
    if entry.arch == "wider_resnet38":
        assert (schedule.type, schedule.mode) == ("linear", "step")
        assert schedule.params.model_dump() == {"alpha": -2.222e-6, "beta": 1}
    else:
        assert (schedule.type, schedule.mode) == ("step", "epoch")
        assert schedule.params.model_dump() == {"step_size": 30, "gamma": 0.1}


def test_each_published_network_has_one_experiment_and_the_reverse() -> None:
    expected = {path.stem: load_experiment(path).expected for path in experiments_dir().glob("*.json")}
    with_weights = [name for name, scores in expected.items() if scores and scores.weights]
    assert sorted(with_weights) == sorted(published())
    assert len(CLASSIFIERS) == 9


def test_there_are_ten_different_published_files_with_licences() -> None:
    entries = published().values()
    assert len({entry.name for entry in entries}) == len({entry.md5 for entry in entries}) == 10
    assert len({entry.weights.drive_id for entry in entries}) == 10
    assert all(len(entry.md5) == 32 and len(entry.weights.drive_id) == 33 for entry in entries)
    assert all(entry.weights.licence for entry in entries)
    assert all(entry.source for entry in CLASSIFIERS)


# The network sections of the original project's files of November 2017 and of January 2018 to February 2019, and the
# bundled experiment that each became; the file of a ResNet-34 asked for a stem that no ResNet has.
OLD_NETWORKS = [
    ("resnext101_ipabn-sync_lr_256", "resnext101", "sync"),
    ("wider_resnet38_ipabn_lr_256", "wider_resnet38", "inplace"),
    ("resnet34_ipabn-sync_lr_512", "resnet34", "sync"),
]


@pytest.mark.parametrize(("name", "arch", "bn_mode"), OLD_NETWORKS, ids=lambda value: value)
def test_files_of_the_original_project_from_before_june_2019_load(
    name: str, arch: str, bn_mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The slope was called leaky_relu_slope; all other keys are those of the later files."""
    bundled = json.loads((experiments_dir() / f"{name}.json").read_text())
    network = {"arch": arch, "activation": "leaky_relu", "leaky_relu_slope": 0.01, "input_3x3": True}
    old = {"network": {**network, "bn_mode": bn_mode}, "optimizer": bundled["optimizer"], "input": bundled["input"]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with caplog.at_level("INFO", "zoo"):
        assert load_experiment(tmp_path / "old.json").network == load_experiment(name).network
    ignored = f"{tmp_path / 'old.json'}: network.input_3x3 = true: is ignored; {arch} has one stem"
    assert (ignored in caplog.messages) == (arch != "resnext101")


def test_the_old_name_of_the_slope_sets_the_slope() -> None:
    network = parse_experiment({"network": {"arch": "resnet18", "leaky_relu_slope": 0.2}}, "x.json").network
    assert network.activation_param == 0.2


def test_the_bundled_experiments_load_without_notices(caplog: pytest.LogCaptureFixture) -> None:
    """What the package says of its own files, no user can mend."""
    with caplog.at_level("INFO", "zoo"):
        for path in experiments_dir().glob("*.json"):
            load_experiment(path)
    assert caplog.messages == []


@pytest.mark.parametrize("path", sorted(experiments_dir().glob("*.json")), ids=lambda path: path.stem)
def test_files_of_the_original_project_are_valid_input(path: Path, tmp_path: Path) -> None:
    original = json.loads(path.read_text())
    original = {section: original[section] for section in ("network", "optimizer", "input")}
    (tmp_path / "x.json").write_text(json.dumps(original))
    assert load_experiment(tmp_path / "x.json").network == load_experiment(path).network


# file, crops, side of a crop, mIoU in percent: the rows of table 2 of the InPlace-ABN paper that were scored on
# validation images. The paper's own words for the norms and the ways to fill the memory are in the names.
SEGMENTATION = """
cityscapes_resnext101_stdbn 16 512 74.42
cityscapes_resnext101_ipabn_fixed_crop 28 512 75.80
cityscapes_resnext101_ipabn_fixed_batch 16 672 77.04
cityscapes_resnext101_ipabn-sync_fixed_batch 16 672 77.58
coco_stuff_resnext101_stdbn 16 480 20.30
coco_stuff_resnext101_ipabn_fixed_crop 24 480 22.63
coco_stuff_resnext101_ipabn_fixed_batch 16 600 23.35
coco_stuff_resnext101_ipabn-sync_fixed_batch 16 600 24.91
cityscapes_wider_resnet38_stdbn 20 512 75.82
cityscapes_wider_resnet38_ipabn_fixed_crop 28 512 77.75
cityscapes_wider_resnet38_ipabn_fixed_batch 20 640 78.31
cityscapes_wider_resnet38_ipabn-sync_fixed_batch 20 640 78.06
coco_stuff_wider_resnet38_stdbn 20 496 22.44
coco_stuff_wider_resnet38_ipabn_fixed_crop 28 496 22.96
coco_stuff_wider_resnet38_ipabn_fixed_batch 20 576 24.10
coco_stuff_wider_resnet38_ipabn-sync_fixed_batch 20 576 25.11
cityscapes_wider_resnet38_ipabn-sync_872 12 872 79.16
cityscapes_wider_resnet38_ipabn-sync_872_class_uniform 12 872 79.40
vistas_wider_resnet38_ipabn-sync_776_class_uniform 12 776 53.12
""".strip().splitlines()


@pytest.mark.parametrize("line", SEGMENTATION, ids=lambda line: line.split()[0])
def test_a_row_of_the_segmentation_table_has_its_settings_and_its_score(line: str) -> None:
    name, crops, side, miou = line.split()
    data = next(data for data in ("cityscapes", "coco_stuff", "vistas") if name.startswith(data))
    settings = {"cityscapes": (19, 360, 2.5e-3), "coco_stuff": (91, 30, 2.5e-3), "vistas": (65, 90, 3.5e-3)}
    classes, epochs, rate = settings[data]
    experiment = experiment_of(name)
    network, optimizer, schedule = experiment.network, experiment.optimizer, experiment.optimizer.schedule
    norm = "standard" if "stdbn" in name else "sync" if "ipabn-sync" in name else "inplace"
    body = "deeplab_resnext101" if "resnext101" in name else "deeplab_wider_resnet38_a2"
    assert (network.arch, network.norm, network.num_classes) == (body, norm, classes)
    assert (network.activation, network.activation_param) == ("leaky_relu", 0.01)
    stem = {"input_3x3": True} if body == "deeplab_resnext101" else {}
    assert network.options == {"output_stride": 8, "pooling_size": int(side) // 8, **stem}
    assert (optimizer.batch_size, optimizer.learning_rate, experiment.input.crop_train) == (int(crops), rate, int(side))
    assert (optimizer.type, optimizer.momentum, optimizer.weight_decay) == ("SGD", 0.9, 1e-4)
    assert (optimizer.nesterov, optimizer.clip, schedule.warmup_epochs) == (False, 0, 0)
    assert (schedule.type, schedule.mode, schedule.epochs) == ("polynomial", "step", epochs)
    assert schedule.params.model_dump() == {"power": 0.9}
    assert experiment.segmentation is not None
    assert (experiment.segmentation.layout, experiment.segmentation.scale_range) == (data, [0.7, 2.0])
    assert experiment.segmentation.hard_pixels == 0.25
    assert experiment.segmentation.class_uniform is name.endswith("_class_uniform")
    assert scores_of(experiment) == {"whole": {"miou": float(miou)}}


# file, error in percent: tables 3 and 4 of the RevNet paper
REVNET_ERRORS = """
resnet32_cifar10 7.14
revnet38_cifar10 7.24
resnet110_cifar10 5.74
revnet110_cifar10 5.76
resnet164_cifar10 5.24
revnet164_cifar10 5.17
resnet32_cifar100 29.95
revnet38_cifar100 28.96
resnet110_cifar100 26.44
revnet110_cifar100 25.40
resnet164_cifar100 23.37
revnet164_cifar100 23.69
resnet101_preact 23.01
revnet104 23.10
""".strip().splitlines()


@pytest.mark.parametrize("line", REVNET_ERRORS, ids=lambda line: line.split()[0])
def test_a_row_of_the_revnet_papers_tables_has_its_settings_and_its_error(line: str) -> None:
    name, error = line.split()
    experiment = experiment_of(name)
    network, optimizer, schedule = experiment.network, experiment.optimizer, experiment.optimizer.schedule
    is_cifar = "cifar" in name
    assert network.arch == (name.rstrip("01") if is_cifar else name)
    assert network.num_classes == (int(name.split("cifar")[1]) if is_cifar else 1000)
    assert (network.activation, network.norm, network.weight_init) == ("relu", "standard", "truncated_normal")
    assert (optimizer.batch_size, optimizer.weight_decay) == ((100, 2e-4) if is_cifar else (256, 1e-4))
    assert (optimizer.type, optimizer.learning_rate, optimizer.momentum) == ("SGD", 0.1, 0.9)
    assert (optimizer.nesterov, optimizer.clip, schedule.warmup_epochs) == (False, 0, 0)
    assert (optimizer.decay_norms, optimizer.decay_biases) == (False, False)
    # Of ImageNet 4 x 64 images, but the ResNet takes twice 4 x 32 one after the other, as more do not fit.
    assert optimizer.accumulate_steps == (2 if name == "resnet101_preact" else 1)
    assert scores_of(experiment) == {f"center{32 if is_cifar else 224}": {"top1": round(100 - float(error), 2)}}


@pytest.mark.parametrize(
    ("name", "steps_per_epoch", "steps", "drops"),
    [
        ("revnet38_cifar10", 500, 80_000, [40_000, 60_000]),
        ("revnet104", 5005, 600_600, [160_000, 320_000, 480_000]),  # 600,000 in the paper: whole epochs here
    ],
)
def test_a_revnets_rate_falls_tenfold_at_the_papers_steps(
    name: str, steps_per_epoch: int, steps: int, drops: list[int]
) -> None:
    schedule = experiment_of(name).optimizer.schedule
    factors = [
        schedule.factor(epoch, step, steps_per_epoch, 0.1)
        for epoch in range(schedule.epochs)
        for step in range(steps_per_epoch)
    ]
    assert len(factors) == steps
    assert [step for step in range(1, steps) if factors[step] != factors[step - 1]] == drops
    assert [factors[step] for step in drops] == pytest.approx([0.1 ** (n + 1) for n in range(len(drops))])


REVNEXT = ["revnext", "revnext_flat", "irevnet_revnext", "revnext_resnet18", "revnext_revnet"]


@pytest.mark.parametrize("arch", REVNEXT)
def test_a_row_of_the_revnext_papers_table_has_the_settings_of_its_section_5(arch: str) -> None:
    experiment = experiment_of(f"{arch}_cifar10")
    optimizer, sizes, schedule = experiment.optimizer, experiment.input, experiment.optimizer.schedule
    assert (experiment.network.arch, experiment.network.activation_param) == (arch, 0.2)
    assert (optimizer.batch_size, optimizer.learning_rate, optimizer.weight_decay) == (512, 0.4, 5e-4)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clip) == (0.9, True, 0)
    assert (optimizer.decay_norms, optimizer.decay_biases) == (True, True)
    assert (schedule.type, schedule.mode, schedule.epochs, schedule.params.model_dump()) == (
        "triangle",
        "step",
        50,
        {"peak_epoch": 5},
    )
    assert (sizes.pad_train, sizes.pad_mode_train, sizes.crop_train, sizes.cutout_train) == (4, "reflect", 32, 8)


def test_the_network_of_each_experiment_can_be_built() -> None:
    """Each network once: many experiments differ in other settings alone. Those of timm only where it is installed."""
    paths = experiments_dir().glob("*.json")
    networks = {network.model_dump_json(): network for network in (load_experiment(path).network for path in paths)}
    for network in networks.values():
        if network.arch.startswith("timm:") and find_spec("timm") is None:
            continue
        with torch.device("meta"):
            model = build_from_config(network)
        assert sum(parameter.numel() for parameter in model.parameters()) > 400_000, network
