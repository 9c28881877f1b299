"""Callbacks get the metrics of each epoch on rank 0 and do not change the run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import zoo
from tests.cli.conftest import events
from tests.dist.spawn import run_distributed
from tests.engine.tiny import differences, make_images
from zoo.config.parse import parse_experiment
from zoo.engine._checkpoint import read

pytestmark = pytest.mark.usefixtures("small_networks")
EXPERIMENT = parse_experiment(
    {
        "network": {"arch": "resnet32_cifar", "classes": 2},
        "optimizer": {
            **{"batch_size": 4, "learning_rate": 0.01},
            "schedule": {"type": "cosine", "mode": "step", "epochs": 2},
        },
        "input": {"crop_train": 10, "scale_val": 12, "crop_val": 10, "random_erasing_train": 0.5},
    },
    "test",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=8, num_val=3)


def train(data: Path, log_dir: Path, *callbacks: Callable[..., object]) -> None:
    zoo.train(EXPERIMENT, data, log_dir=log_dir, callbacks=callbacks, log_every=1, verbose=False)


def test_callbacks_get_metrics_of_log_and_do_not_change_the_run(data: Path, tmp_path: Path) -> None:
    found: list[Any] = []

    def draw(metrics: Mapping[str, float]) -> None:
        torch.randn(3), random.random(), np.random.rand()
        found.append(dict(metrics))
        assert isinstance(metrics, dict)
        metrics.clear()

    second: list[Any] = []
    train(data, tmp_path / "a", draw, second.append)
    train(data, tmp_path / "b")
    assert differences(*(read(tmp_path / name / "checkpoint.pth.tar") for name in "ab")) == []
    records = events(tmp_path / "a")
    last_steps = [record for record in records if record["event"] == "train" and record["batch"] == 2]
    validations = [record for record in records if record["event"] == "validation"]
    assert found == second
    assert found == [
        {
            "epoch": epoch + 1,
            "step": 2 * (epoch + 1),
            "lr": step["lr"],
            **{f"train/{key}": step[f"epoch_{key}"] for key in ("loss", "top1", "top5")},
            **{f"val/{key}": validation[key] for key in ("loss", "top1", "top5")},
        }
        for epoch, (step, validation) in enumerate(zip(last_steps, validations, strict=True))
    ]


def test_run_without_validation_has_training_metrics(tmp_path: Path) -> None:
    items = [(torch.randn(3, 32, 32), index % 2) for index in range(4)]
    found: list[Any] = []
    model = zoo.get("resnet32_cifar", num_classes=2)
    zoo.train(model, items, epochs=1, log_dir=tmp_path, callbacks=[found.append], verbose=False)  # type: ignore[arg-type]
    assert [set(metrics) for metrics in found] == [{"epoch", "step", "lr", "train/loss", "train/top1", "train/top5"}]


def test_error_of_callback_ends_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="full"):
        train(data, tmp_path, mock.Mock(side_effect=RuntimeError("full")))


def _epochs_of_rank(data: Path, log_dir: Path) -> list[float]:
    found: list[Any] = []
    train(data, log_dir, found.append)
    return [metrics["epoch"] for metrics in found]


@pytest.mark.dist
def test_only_rank_0_calls(data: Path, tmp_path: Path) -> None:
    assert run_distributed(_epochs_of_rank, 2, data, tmp_path, group=False) == [[1, 2], []]


def _with_callbacks_on_rank_0(data: Path, log_dir: Path) -> str:
    try:
        train(data, log_dir, *([print] if os.environ["RANK"] == "0" else []))
    except zoo.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_callbacks_on_one_rank_alone_raise(data: Path, tmp_path: Path) -> None:
    for error in run_distributed(_with_callbacks_on_rank_0, 2, data, tmp_path, group=False):
        assert "callbacks" in error
