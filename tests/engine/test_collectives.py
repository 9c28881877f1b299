"""Number and size of the messages between processes in a step."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.dist.spawn import run_distributed
from tests.engine.tiny import MemoryLog, make_config, new_state, run
from zoo.engine import _trainer as trainer
from zoo.engine._state import TrainState
from zoo.engine._step import StepBatch, train_step
from zoo.layers import InPlaceABN, InPlaceABNSync

pytestmark = pytest.mark.dist

CHANNELS = (8, 16)
NUM_BYTES = {"float": 4, "double": 8, "long int": 8, "c10::BFloat16": 2}  # bytes per element
NORMS = {"standard": nn.BatchNorm2d, "inplace": InPlaceABN, "sync": InPlaceABNSync}


def _network(norm: str) -> nn.Module:
    layers, channels = [], 3
    for num in CHANNELS:
        layers += [nn.Conv2d(channels, num, 3, bias=False), NORMS[norm](num)]
        channels = num
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))


def _messages_of_a_step(norm: str, num_parts: int) -> tuple[list[tuple[str, int]], int]:
    """Return kind and bytes of each message of a step, and the bytes of all parameters."""
    config = make_config(optimizer={"accumulate_steps": num_parts, "batch_size": 16})
    state = new_state(config, _network(norm))
    batch = StepBatch(torch.randn(8, 3, 8, 8), torch.arange(8) % 2, 16)
    for _ in range(2):  # DistributedDataParallel agrees on its buckets at the second step
        train_step(state, batch)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        train_step(state, batch)
        time.sleep(0.3)  # Gloo's threads may end their events after the step has its results
    messages = []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name().startswith("gloo:"):
            sizes = [
                math.prod(shape) * NUM_BYTES[dtype] for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
            ]
            messages.append((event.name().removeprefix("gloo:"), sum(sizes)))
    return messages, sum(parameter.numel() * parameter.element_size() for parameter in state.model.parameters())


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("norm", ["standard", "inplace"])
def test_unsynchronized_norms_send_nothing(norm: str, num_parts: int) -> None:
    for messages, num_bytes in run_distributed(_messages_of_a_step, 2, norm, num_parts):
        assert messages == [("all_reduce", num_bytes)]


@pytest.mark.parametrize("num_parts", [1, 2])
def test_synchronized_norm_sends_one_message_per_direction(num_parts: int) -> None:
    for messages, num_bytes in run_distributed(_messages_of_a_step, 2, "sync", num_parts):
        forward = [("all_gather", 8 * (2 * num + 1)) for num in CHANNELS]  # means, variances, count
        backward = [("all_reduce", 4 * 2 * num) for num in CHANNELS]  # two sums
        assert Counter(messages) == Counter(num_parts * (forward + backward) + [("all_reduce", num_bytes)])


def _messages_of_the_loop(data: Path, log_dir: Path, log_interval: int) -> list[list[tuple[str, int]]]:
    """Return the loop's own messages between two steps, for all pairs of steps of a run."""
    messages: list[list[tuple[str, int]]] = []
    all_reduce = dist.all_reduce

    def spy_step(state: TrainState, batch: StepBatch) -> None:
        train_step(state, batch)
        messages.append([])

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if messages:
            messages[-1].append(("all_reduce", tensor.numel() * tensor.element_size()))
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(trainer, "train_step", spy_step), mock.patch.object(dist, "all_reduce", spy):
        run(make_config(), data, log_dir, MemoryLog(), log_interval=log_interval)
    return messages


def test_loop_sends_one_number_per_step_and_two_messages_per_report(data: Path, tmp_path: Path) -> None:
    signal = ("all_reduce", 8)
    for messages in run_distributed(_messages_of_the_loop, 2, data, tmp_path / "rare", 100):
        assert messages[0:4] == [[signal]] * 4
    for messages in run_distributed(_messages_of_the_loop, 2, data, tmp_path / "often", 1):
        averages = ("all_reduce", 8 * (2 * 2 + 2 + 1))  # loss and bad step of two ranks, top-1, top-5, count
        failed_write = ("all_reduce", 8)
        assert messages[0:4] == [[averages, failed_write, signal]] * 4
