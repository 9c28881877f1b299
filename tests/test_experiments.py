"""The bundled experiments and the index of published weights agree with the original project."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.refusals import refused
from zoo.config.experiment import Experiment
from zoo.config.parse import experiments_dir, load_experiment, parse_experiment
from zoo.config.published import published
from zoo.errors import ConfigError
from zoo.registry.get import build_from_config

ORIGINALS = [entry for entry in published().values() if entry.digest.kind == "md5"]
CLASSIFIERS = [entry for entry in ORIGINALS if entry.experiment.task == "classification"]

# name, architecture, bn_mode, 3x3 stem, batch, learning rate, center 224, ten crops 224, center 320, md5:
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
    return {protocol: score.model_dump(exclude_none=True) for protocol, score in experiment.expected.scores.items()}


@pytest.mark.parametrize("line", ORIGINAL, ids=lambda line: line.split()[0])
def test_published_experiment_has_published_settings_and_scores(line: str) -> None:
    name, arch, bn_mode, input_3x3, batch_size, learning_rate, *columns, md5 = line.split()
    experiment = experiment_of(name)
    network, optimizer = experiment.network, experiment.optimizer
    assert (network.arch, network.norm) == (arch, bn_mode)
    # The original file of the WiderResNet requests a stem that no WiderResNet has.
    assert network.options == ({"input_3x3": True} if input_3x3 == "True" and arch != "wider_resnet38" else {})
    assert (network.activation, network.activation_param, network.num_classes) == ("leaky_relu", 0.01, 1000)
    assert (network.weight_init, network.weight_gain_multiplier) == ("xavier_normal", 1)
    assert (optimizer.batch_size, optimizer.learning_rate) == (int(batch_size), float(learning_rate))
    assert (optimizer.type, optimizer.momentum, optimizer.weight_decay) == ("SGD", 0.9, 1e-4)
    assert (optimizer.nesterov, optimizer.clip, optimizer.schedule.epochs) == (True, 0, 90)
    assert (experiment.input.color_jitter_train, experiment.input.lighting_train) == (True, True)
    assert published()[name].digest == ("md5", md5)
    protocols = ("center224", "tencrop224", "center320")
    scores = [dict(zip(("top1", "top5"), map(float, column.split("/")), strict=True)) for column in columns]
    assert scores_of(experiment) == dict(zip(protocols, scores, strict=True))


def test_each_published_network_has_one_experiment_and_reverse() -> None:
    expected = {path.stem: load_experiment(path).expected for path in experiments_dir().glob("*.json")}
    with_weights = [name for name, scores in expected.items() if scores and scores.weights]
    assert sorted(with_weights) == sorted(published())
    assert len(CLASSIFIERS) == 9


def test_ten_files_of_the_original_project_exist() -> None:
    assert len({entry.name for entry in ORIGINALS}) == len({entry.digest for entry in ORIGINALS}) == 10
    assert len({entry.weights.drive_id for entry in ORIGINALS}) == 10
    assert all(len(entry.digest.digits) == 32 and len(entry.weights.drive_id) == 33 for entry in ORIGINALS)
    assert all(entry.weights.license and entry.expected.source for entry in published().values())


# Size of images and top-1 of the seven files of RevBiFPN, and the stochastic depth in training.
REVBIFPN = [
    *[(224, 72.8, 0), (256, 75.9, 0), (256, 79.0, 0), (288, 81.1, 0.05)],
    *[(320, 83.0, 0.1), (352, 83.7, 0.1), (352, 84.2, 0.3)],
]


@pytest.mark.parametrize("size", range(7))
def test_files_of_revbifpn_have_published_scores_and_no_recipe(size: int) -> None:
    side, top1, drop_path_rate = REVBIFPN[size]
    entry = published()[f"revbifpn_s{size}_imagenet"]
    assert (entry.digest.kind, len(entry.digest.digits)) == ("sha256", 64)
    assert entry.page == f"https://cerebras-public.s3.us-west-2.amazonaws.com/revbifpn/revbifpn_s{size}.pth.tar"
    images = entry.experiment.input
    assert (images.crop_val, images.scale_val) == (side, int(side / 0.875))
    assert entry.scores == {f"center{side}": {"top1": top1}}
    assert entry.experiment.network.options.get("drop_path_rate", 0) == drop_path_rate
    assert not entry.experiment.has_recipe


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        ({}, "drive_id = null"),
        ({"drive_id": "x", "url": "https://a.org/b"}, "sha256 = null"),
        ({"drive_id": "x", "sha256": "0" * 64}, 'sha256 = "0000'),
        ({"url": "http://a.org/b", "sha256": "0" * 64}, 'url = "http://a.org/b"'),
    ],
)
def test_weights_have_one_address_and_one_digest(weights: dict[str, str], key: str) -> None:
    expected = {"source": "x", "scores": {"center224": {"top1": 1}}, "weights": {"license": "MIT", **weights}}
    content = {"network": {"arch": "resnet18"}, "expected": expected}
    refused(ConfigError, lambda: parse_experiment(content, "x.json"), f"expected.weights.{key}")


def test_files_of_original_project_from_before_june_2019_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The slope was called leaky_relu_slope. The file of a ResNet-34 asked for a stem that no ResNet has."""
    content = json.loads((experiments_dir() / "resnet34_ipabn-sync_lr_512.json").read_text())
    network = {"arch": "resnet34", "activation": "leaky_relu", "leaky_relu_slope": 0.01, "input_3x3": True}
    (tmp_path / "old.json").write_text(json.dumps({**content, "network": {**network, "bn_mode": "sync"}}))
    with caplog.at_level("INFO", "zoo"):
        assert load_experiment(tmp_path / "old.json").network == experiment_of("resnet34_ipabn-sync_lr_512").network
    message = f"{tmp_path / 'old.json'}: network.input_3x3 = true: is ignored; resnet34 has one stem"
    assert caplog.messages == [message]


def test_bundled_experiments_load_without_notices(caplog: pytest.LogCaptureFixture) -> None:
    """Users cannot act on notices about bundled files."""
    with caplog.at_level("INFO", "zoo"):
        for path in experiments_dir().glob("*.json"):
            load_experiment(path)
    assert caplog.messages == []


@pytest.mark.parametrize("path", sorted(experiments_dir().glob("*.json")), ids=lambda path: path.stem)
def test_files_of_original_project_are_valid_input(path: Path, tmp_path: Path) -> None:
    original = json.loads(path.read_text())
    original = {section: original[section] for section in ("network", "optimizer", "input") if section in original}
    (tmp_path / "x.json").write_text(json.dumps(original))
    assert load_experiment(tmp_path / "x.json").network == load_experiment(path).network


# data, classes, and crop sizes of the rows of table 2 of the InPlace-ABN paper that were scored on validation images:
# standard norms, in-place norms with fixed crop, in-place norms with fixed batch
SEGMENTATION = {
    "cityscapes_resnext101": (19, 16, 512, 28, 512, 16, 672),
    "coco_stuff_resnext101": (91, 16, 480, 24, 480, 16, 600),
    "cityscapes_wider_resnet38": (19, 20, 512, 28, 512, 20, 640),
    "coco_stuff_wider_resnet38": (91, 20, 496, 28, 496, 20, 576),
}


@pytest.mark.parametrize("name", SEGMENTATION)
def test_rows_of_segmentation_table_have_their_crops(name: str) -> None:
    classes, *crops = SEGMENTATION[name]
    rows = ("stdbn", "ipabn_fixed_crop", "ipabn_fixed_batch", "ipabn-sync_fixed_batch")
    for row, norm, batch, side in zip(rows, ("standard", "inplace", "inplace", "sync"),
                                      (*crops[::2], crops[4]), (*crops[1::2], crops[5]), strict=True):  # fmt: skip
        experiment = experiment_of(f"{name}_{row}")
        network = experiment.network
        assert (experiment.optimizer.batch_size, experiment.input.crop_train) == (batch, side)
        assert (network.norm, network.num_classes, network.options["pooling_size"]) == (norm, classes, side // 8)


@pytest.mark.slow
def test_network_of_each_experiment_can_be_built() -> None:
    """Each network once: many experiments differ in other settings alone. Skips timm where it is not installed."""
    paths = experiments_dir().glob("*.json")
    networks = {network.model_dump_json(): network for network in (load_experiment(path).network for path in paths)}
    for network in networks.values():
        if network.arch.startswith("timm:") and find_spec("timm") is None:
            continue
        with torch.device("meta"):
            model = build_from_config(network)
        assert sum(parameter.numel() for parameter in model.parameters()) > 400_000, network
