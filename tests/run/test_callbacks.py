"""Callbacks get the metrics of each epoch on rank 0 and do not change the run."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from tests.dist.spawn import run_distributed
from tests.engine.tiny import differences, make_images
from zoo.config.parse import parse_experiment
from zoo.engine.checkpoint import read

SETTINGS = {
    "network": {"arch": "resnet32_cifar", "classes": 2},
    "optimizer": {"batch_size": 4, "learning_rate": 0.01, "schedule": {"type": "cosine", "mode": "step", "epochs": 2}},
    "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10, "random_erasing_train": 0.5},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=8, num_val=3)


def _train(data: Path, log_dir: Path, **options: Any) -> list[dict[str, float]]:
    found: list[Any] = []
    experiment = parse_experiment(SETTINGS, "test")
    zoo.train(experiment, data, log_dir=log_dir, callbacks=[found.append], log_every=1, verbose=False, **options)
    return found


def test_metrics_are_those_of_the_log(data: Path, tmp_path: Path) -> None:
    found = _train(data, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["event"] == "train" and record["batch"] == 2]
    val = [record for record in records if record["event"] == "validation"]
    assert found == [
        {
            "epoch": epoch + 1,
            "step": 2 * (epoch + 1),
            "lr": of_train["lr"],
            "train/loss": of_train["epoch_loss"],
            "train/top1": of_train["epoch_top1"],
            "train/top5": of_train["epoch_top5"],
            "val/loss": of_val["loss"],
            "val/top1": of_val["top1"],
            "val/top5": of_val["top5"],
        }
        for epoch, (of_train, of_val) in enumerate(zip(train, val, strict=True))
    ]


def test_callbacks_cannot_change_the_run(data: Path, tmp_path: Path) -> None:
    def draw(metrics: Mapping[str, float]) -> None:
        torch.randn(3), random.random(), np.random.rand()
        assert isinstance(metrics, dict)
        metrics.clear()

    experiment = parse_experiment(SETTINGS, "test")
    seen: list[Any] = []
    zoo.train(experiment, data, log_dir=tmp_path / "a", callbacks=[draw, seen.append], verbose=False)
    zoo.train(experiment, data, log_dir=tmp_path / "b", verbose=False)
    contents = [read(tmp_path / name / "checkpoint.pth.tar") for name in "ab"]
    assert differences(*contents) == []
    assert [metrics["epoch"] for metrics in seen] == [1, 2]


def test_run_without_validation_has_training_metrics(tmp_path: Path) -> None:
    items = [(torch.randn(3, 32, 32), index % 2) for index in range(4)]
    found: list[Any] = []
    model = zoo.get("resnet32_cifar", num_classes=2)
    zoo.train(model, items, epochs=1, log_dir=tmp_path, callbacks=[found.append], verbose=False)  # type: ignore[arg-type]
    assert [set(metrics) for metrics in found] == [{"epoch", "step", "lr", "train/loss", "train/top1", "train/top5"}]


def test_error_of_callback_ends_run(data: Path, tmp_path: Path) -> None:
    def fail(metrics: Mapping[str, float]) -> None:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        zoo.train(parse_experiment(SETTINGS, "test"), data, log_dir=tmp_path, callbacks=[fail], verbose=False)


def _of_rank(data: Path, log_dir: Path) -> list[dict[str, float]]:
    return _train(data, log_dir)


@pytest.mark.dist
def test_only_rank_0_calls(data: Path, tmp_path: Path) -> None:
    first, second = run_distributed(_of_rank, 2, data, tmp_path, group=False)
    assert [metrics["epoch"] for metrics in first] == [1, 2]
    assert second == []


def _with_callbacks_on_rank_0(data: Path, log_dir: Path) -> str:
    import os

    callbacks = [print] if os.environ["RANK"] == "0" else []
    try:
        zoo.train(parse_experiment(SETTINGS, "test"), data, log_dir=log_dir, callbacks=callbacks, verbose=False)
    except zoo.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_callbacks_on_one_rank_alone_raise(data: Path, tmp_path: Path) -> None:
    for error in run_distributed(_with_callbacks_on_rank_0, 2, data, tmp_path, group=False):
        assert "callbacks" in error
