"""A run that goes on with another number of processes trains on the same images in the same order.

Where norms are synchronized its weights are those of the undisturbed run up to rounding.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, make_config, make_images, run
from zoo.data.sampler import Key, TrainBatches
from zoo.engine.checkpoint import CHECKPOINT, read
from zoo.engine.reporting import TrainMetrics
from zoo.errors import TrainingInterrupted
from zoo.layers import norm_act
from zoo.spec.network import NetworkSpec

pytestmark = pytest.mark.dist

NUM_STEPS = 15  # three epochs of five batches
TOLERANCE = 200 * torch.finfo(torch.float32).eps  # of some ten roundings in each step, and weights of about 1


def _build(network: NetworkSpec) -> nn.Module:
    """Return a network with a synchronized norm, and without random numbers of its own."""
    norm = norm_act("sync", activation="leaky_relu")
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, network.num_classes)
    )


def _train(data: Path, log_dir: Path, stop_at: int | None) -> tuple[int, list[list[Key]]]:
    """Train until a signal at ``stop_at``, or to the end; return the steps done and this rank's images of each."""
    drawn: list[list[Key]] = []
    iterate = TrainBatches.__iter__

    def noted(batches: TrainBatches) -> Iterator[list[Key]]:
        for keys in iterate(batches):
            drawn.append(keys)
            yield keys

    TrainBatches.__iter__ = noted  # type: ignore[method-assign]  # the process ends after this function
    steps: list[int] = []

    def note(metrics: TrainMetrics) -> None:
        steps.append(metrics.step)
        if metrics.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        options: dict[str, Any] = {"resume": "auto", "allow_world_size_change": True, "build": _build}
        config = make_config(network={"bn_mode": "sync"}, optimizer={"batch_size": 12})
        run(config, data, log_dir, MemoryLog(note), **options)
    except TrainingInterrupted:
        assert stop_at is not None
    return len(steps), drawn[: len(steps)]


def _global_batches(shares: list[tuple[int, list[list[Key]]]]) -> list[list[Key]]:
    """Return the images of each step of all ranks, in the order of the whole batch."""
    batches = []
    for parts in zip(*(drawn for _, drawn in shares), strict=True):
        batch: list[Any] = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            batch[rank :: len(parts)] = part
        batches.append(batch)
    return batches


def test_two_then_one_then_three_processes_train_as_two_do(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", num_train=60)
    straight, elastic = tmp_path / "straight", tmp_path / "elastic"
    expected = _global_batches(run_distributed(_train, 2, data, straight, None))
    batches: list[list[Key]] = []
    for world_size, stop_at in ((2, 3), (1, 7), (3, None)):
        done = _global_batches(run_distributed(_train, world_size, data, elastic, stop_at))
        assert 0 < len(done) < NUM_STEPS
        batches += done
    assert len(batches) == NUM_STEPS
    assert batches == expected
    first, second = (read(folder / CHECKPOINT)["state_dict"] for folder in (straight, elastic))
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, key=key: key)
