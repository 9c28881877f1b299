"""Robustness sets: each is scored on its own classes and by its own measure, compared with a computation by hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from tests.data.sample_images import random_image
from tests.refusals import refused
from zoo.config.parse import parse_experiment
from zoo.data.imagenet import imagenet_wnids
from zoo.errors import ConfigError, DataError
from zoo.registry.load_network import LoadedNetwork
from zoo.run.robustness import score_set
from zoo.tasks.prediction import PredictionCollector

SIDE = 8
SETTINGS = {
    "network": {"arch": "resnet18", "classes": 1000},
    "optimizer": {"batch_size": 16},
    "input": {"scale_val": 10, "crop_val": SIDE, "crop_train": SIDE, "mean": [0.5] * 3, "std": [0.25] * 3},
}
WNIDS = imagenet_wnids()


@pytest.fixture
def network() -> LoadedNetwork:
    """A network whose predictions are spread over all classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 1000, bias=False)).eval()
    return LoadedNetwork("tiny", model, parse_experiment(SETTINGS, "x"))


def _logits(network: LoadedNetwork, path: Path) -> Tensor:
    preprocess = transforms.Compose(
        [
            transforms.Resize(10),
            transforms.CenterCrop(SIDE),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    with torch.no_grad():
        return network.model(preprocess(Image.open(path))[None])[0]


def _write(root: Path, classes: dict[str, int], predicted: Callable[[Path], int]) -> None:
    """Write two images per class; the first images of two classes go into the folders that the network predicts."""
    names = {number: name for name, number in classes.items()}
    for index, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for image in range(2):
            path = root / name / f"{index}{image}.png"
            random_image(10 * index + image, 12, 10).save(path)
            if image == 0 and index < 2:
                (root / names[predicted(path)]).mkdir(exist_ok=True)
                path.rename(root / names[predicted(path)] / path.name)


def _accuracy(root: Path, numbers: dict[str, int], predict: Callable[[Path], list[int]], top: int) -> float:
    paths = sorted(root.glob("*/*.png"))
    return 100 * sum(numbers[path.parent.name] in predict(path)[:top] for path in paths) / len(paths)


@pytest.mark.parametrize("name", ["imagenet-a", "imagenet-r"])
def test_networks_choose_among_the_classes_of_a_and_r(
    name: str, network: LoadedNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {WNIDS[number]: number for number in (7, 4, 901, 333, 555, 20, 21)}
    columns = sorted(numbers.values())

    def predict(path: Path) -> list[int]:
        order = _logits(network, path)[columns].argsort(descending=True)
        return [columns[place] for place in order.tolist()]

    _write(tmp_path / "set", numbers, lambda path: predict(path)[0])
    with caplog.at_level(logging.WARNING):
        content = score_set(network, tmp_path / "set", name).content
    expected = [_accuracy(tmp_path / "set", numbers, predict, top) for top in (1, 5)]
    assert [content["top1"], content["top5"]] == pytest.approx(expected)
    assert 0 < expected[0] < 100
    assert content["set"] == name
    assert f"{name} has 200 classes, but the folder has 7 class folders" in caplog.text
    # Among all 1000 classes, the network is right less often.
    assert score_set(network, tmp_path / "set", "imagenet-sketch").content["top1"] < expected[0]


def test_sketch_is_scored_among_all_classes(network: LoadedNetwork, tmp_path: Path) -> None:
    number = int(_logits_of_new_image(network, tmp_path / "first.png").argmax())
    numbers = {WNIDS[number]: number, WNIDS[(number + 1) % 1000]: (number + 1) % 1000}
    for wnid in numbers:
        (tmp_path / "set" / wnid).mkdir(parents=True)
        (tmp_path / "set" / wnid / "0.png").write_bytes((tmp_path / "first.png").read_bytes())
    assert score_set(network, tmp_path / "set", "imagenet-sketch").content["top1"] == 50


def _logits_of_new_image(network: LoadedNetwork, path: Path) -> Tensor:
    random_image(5, 12, 10).save(path)
    return _logits(network, path)


def test_folders_of_v2_are_sorted_as_numbers(network: LoadedNetwork, tmp_path: Path) -> None:
    best = _logits_of_new_image(network, tmp_path / "first.png").topk(3).indices.tolist()
    for number in {*best, 2, 10, 100}:
        (tmp_path / "set" / str(number)).mkdir(parents=True)
        (tmp_path / "set" / str(number) / "0.png").write_bytes((tmp_path / "first.png").read_bytes())
    folders = list((tmp_path / "set").iterdir())
    content = score_set(network, tmp_path / "set", "imagenet-v2").content
    assert content["top1"] == pytest.approx(100 / len(folders))
    in_best5 = _logits(network, tmp_path / "first.png").topk(5).indices.tolist()
    assert content["top5"] == pytest.approx(100 * sum(int(f.name) in in_best5 for f in folders) / len(folders))
    (tmp_path / "set" / "1000").mkdir()
    refused(DataError, lambda: score_set(network, tmp_path / "set", "imagenet-v2"), "1 of ", ": 1000")


def test_real_accepts_any_label_and_skips_unlabeled_images(network: LoadedNetwork, tmp_path: Path) -> None:
    labels: list[list[int]] = [[] for _ in range(50_000)]
    wnids = [WNIDS[3], WNIDS[500]]
    expected = {1: [], 5: []}
    for number in range(1, 9):
        path = tmp_path / "val" / wnids[number % 2] / f"ILSVRC2012_val_{number:08}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        random_image(number, 12, 10).save(path)
        order = _logits(network, path).argsort(descending=True).tolist()
        labels[number - 1] = {0: [], 1: [order[0], 9], 2: [order[3]], 3: [order[700], order[800]]}[number % 4]
        for top, hits in expected.items():
            if labels[number - 1]:
                hits.append(any(label in order[:top] for label in labels[number - 1]))
    (tmp_path / "real.json").write_text(json.dumps(labels))
    collector = PredictionCollector(tmp_path)
    scores = score_set(network, tmp_path, "imagenet-real", record=collector)
    assert scores.content["top1"] == pytest.approx(100 * sum(expected[1]) / len(expected[1]))
    assert scores.content["top5"] == pytest.approx(100 * sum(expected[5]) / len(expected[5]))
    assert (scores.content["count"], scores.content["without_label"]) == (6, 2)
    assert "2 more images have no label and are excluded" in scores.table
    assert len(collector.predictions) == 8
    (tmp_path / "real.json").unlink()
    refused(DataError, lambda: score_set(network, tmp_path, "imagenet-real"), "real.json")


@pytest.mark.parametrize("change", ["classes", "names"])
def test_networks_of_other_classes_raise(change: str, network: LoadedNetwork, tmp_path: Path) -> None:
    other: Any
    if change == "classes":
        settings = {**SETTINGS, "network": {"arch": "resnet18", "classes": 10}}
        other = replace(network, experiment=parse_experiment(settings, "x"))
    else:
        other = replace(network, class_names=WNIDS[::-1])
    refused(ConfigError, lambda: score_set(other, tmp_path, "imagenet-r"), "--set imagenet-r: tiny")
