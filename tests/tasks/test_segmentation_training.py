"""The engine trains a segmentation as it trains a classification: on any number of processes, logged and saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.data.sample_labels import make_labeled
from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, build_segmenter, make_segmentation_config, run
from tests.refusals import refused
from zoo.engine._checkpoint import CHECKPOINT, read
from zoo.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_labeled(tmp_path_factory.mktemp("data"), num_train=8, num_val=6)


def test_epochs_report_and_choose_the_best_by_miou(data: Path, tmp_path: Path) -> None:
    log = MemoryLog()
    state = run(make_segmentation_config(), data, tmp_path, log, build=build_segmenter)
    assert [sorted(metrics.scores) for metrics in log.metrics] == [sorted(state.task.labels)] * 4
    scores = [result.score for _, _, result, _ in log.validations]
    assert scores == [result.miou for _, _, result, _ in log.validations]
    content = read(tmp_path / CHECKPOINT)
    assert content["best_prec1"] == max(scores)
    assert content["ranks"][0]["meter"]["counts"].shape == (3 * 3 + 2,)


def _trained_weights(data: Path, log_dir: Path) -> Tensor:
    """Take two steps of two crops and return the weights: on two processes each has a single crop."""
    optimizer = {"batch_size": 2, "ema_decay": None, "schedule": {"epochs": 1}}
    config = make_segmentation_config(optimizer=optimizer)
    return nn.utils.parameters_to_vector(
        run(config, data, log_dir, MemoryLog(), build=build_segmenter).model.parameters()
    )


@pytest.mark.dist
def test_two_processes_with_one_crop_each_equal_one_with_both(tmp_path: Path) -> None:
    """Synchronized norms count over the group, in the pooled branch too."""
    data = make_labeled(tmp_path / "data", num_train=4, num_val=2)
    first, second = run_distributed(_trained_weights, 2, data, tmp_path / "two")
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _trained_weights(data, tmp_path / "one"), rtol=1e-4, atol=1e-6)


def test_single_crop_per_process_raises_with_remedy(data: Path, tmp_path: Path) -> None:
    config = make_segmentation_config(optimizer={"batch_size": 1})
    train = partial(run, config, data, tmp_path, MemoryLog(), build=build_segmenter)
    refused(ConfigError, train, "single crop", "sync", "freeze")


def test_classes_in_another_order_are_noticed_at_resume(tmp_path: Path) -> None:
    data = make_labeled(tmp_path / "data", num_train=8, num_val=2)
    (data / "classes.txt").write_text("sky\nroad\ncar\n")
    run(make_segmentation_config(), data, tmp_path / "log", MemoryLog(), build=build_segmenter)
    (data / "classes.txt").write_text("road\nsky\ncar\n")
    config = make_segmentation_config()
    train = partial(run, config, data, tmp_path / "log", MemoryLog(), build=build_segmenter, resume="auto")
    refused(CheckpointError, train, "another order")
