"""Runs with every augmentation and regularization at once resume exactly, however they are divided."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, differences, make_config, make_images, run
from tests.refusals import refused
from zoo.config.experiment import Experiment, check_world_size
from zoo.config.network import NetworkSpec
from zoo.engine import trainer
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.reporting import TrainMetrics
from zoo.engine.state import TrainState
from zoo.engine.step import StepBatch
from zoo.errors import ConfigError, TrainingInterrupted

TOLERANCE = 200 * torch.finfo(torch.float32).eps  # about ten roundings per step, and weights of about 1
# torch warns about more workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"), num_train=44)


def _config(repeats: int = 3, **changes: Any) -> Experiment:
    """Return settings with all features enabled: three epochs of six batches; the last batch has four images."""
    images = {
        "crop_scale_train": [0.3, 1.0],
        "interpolation_train": "random",
        "augment_train": "randaugment",
        "augment_params_train": {"interpolation": "bilinear"},
        "color_jitter_train": 0.3,
        "random_erasing_train": 0.5,
        "random_erasing_mode_train": "pixel",
        "repeats_train": repeats,
    }
    mixing = {"mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.7, "loss": "bce"}
    averaging = {"ema_every": 2, "label_smoothing": 0.1}
    return make_config(input=images, regularization=mixing, optimizer={**averaging, **changes})


def _watched_run(
    config: Experiment, data: Path, log_dir: Path, **options: Any
) -> tuple[TrainState, list[tuple[Tensor, Tensor]]]:
    """Train, and return the state at the end and the images and targets of each step."""
    seen: list[tuple[Tensor, Tensor]] = []
    step = trainer.train_step

    def watched(state: TrainState, batch: StepBatch) -> None:
        seen.append((batch.images.clone(), batch.targets.clone()))
        step(state, batch)

    with mock.patch.object(trainer, "train_step", watched):
        return run(config, data, log_dir, options.pop("log", MemoryLog()), **options), seen


@pytest.fixture(scope="module")
def straight(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """The last checkpoint of a run without a break, and its images and targets."""
    folder = tmp_path_factory.mktemp("straight")
    _, seen = _watched_run(_config(), data, folder)
    return read(folder / CHECKPOINT), seen


@pytest.mark.parametrize("stop_at", [2, pytest.param(8, marks=pytest.mark.exhaustive), 14])
def test_run_stopped_within_epoch_resumes_bit_identically(
    data: Path, tmp_path: Path, straight: tuple[dict[str, Any], list[tuple[Tensor, Tensor]]], stop_at: int
) -> None:
    def send(metrics: TrainMetrics) -> None:
        if metrics.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    checkpoint, expected = straight
    assert {targets.dim() for _, targets in expected} == {1, 2}  # some batches are not mixed
    stopped = tmp_path / "stopped"
    with pytest.raises(TrainingInterrupted):
        run(_config(), data, stopped, MemoryLog(send))
    assert read(stopped / CHECKPOINT)["position"]["step"] == stop_at
    _, rest = _watched_run(_config(), data, stopped, resume="auto")
    for (images, targets), (ours, own_targets) in zip(expected[stop_at:], rest, strict=True):
        assert torch.equal(images, ours)
        assert torch.equal(targets, own_targets)
    assert differences(checkpoint, read(stopped / CHECKPOINT)) == []


def test_number_of_workers_does_not_change_bits(
    data: Path, tmp_path: Path, straight: tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]
) -> None:
    run(_config(), data, tmp_path, MemoryLog(), workers=2)
    assert differences(straight[0], read(tmp_path / CHECKPOINT)) == []


def _build(network: NetworkSpec) -> nn.Module:
    """Return a network without norms, which would use the statistics of a part, and without random numbers."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, network.num_classes)
    )


def _of_rank(config: Experiment, data: Path, log_dir: Path) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    state, seen = _watched_run(config, data, log_dir, build=_build)
    return state.model.state_dict(), seen


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_and_accumulation_see_images_of_one(data: Path, tmp_path: Path) -> None:
    weights, expected = _of_rank(_config(batch_size=12), data, tmp_path / "one")
    assert [len(images) for images, _ in expected] == [12, 12, 12, 8] * 3  # some images of the last have no partner
    shares = run_distributed(_of_rank, 2, _config(batch_size=12, accumulate_steps=2), data, tmp_path / "two")
    for number, (images, targets) in enumerate(expected):
        together, of_targets = torch.empty_like(images), torch.empty_like(targets)
        for rank, (_, seen) in enumerate(shares):
            together[rank::2], of_targets[rank::2] = seen[number]
        assert torch.equal(together, images)
        assert torch.equal(of_targets, targets)
    for key, tensor in shares[0][0].items():
        torch.testing.assert_close(tensor, weights[key], rtol=TOLERANCE, atol=TOLERANCE)


def test_odd_batch_per_process_raises() -> None:
    check_world_size(_config(), 4)
    refused(ConfigError, lambda: check_world_size(_config(), 8), "batch_size = 8", "(8)")
