"""The angle between reconstructed and stored gradients is measured on the step's batch, and changes no run."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.engine.tiny import MemoryLog, differences, make_config, run
from zoo.config.network import NetworkSpec
from zoo.engine._observers import gradient_angle
from zoo.engine._process import Process
from zoo.engine._reconstruction import gradients
from zoo.engine._start import start
from zoo.engine._state import TrainState, rank_state, shared_state
from zoo.engine._step import StepBatch, train_step
from zoo.layers import InPlaceABN, ReversibleBlock, ReversibleSequential
from zoo.tasks import task_of

pytestmark = pytest.mark.slow  # trains several times


class _Off(nn.Module):
    """Multiplies by a different number in every second call, so that forward cannot be inverted exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * (next(self.calls) % 2))


def _branch() -> nn.Module:
    """Return a branch with a norm, random numbers and, in its middle, a norm that works in place."""
    layers = [nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), InPlaceABN(4), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1))


def _net(network: NetworkSpec, blocks: Any = None) -> nn.Module:
    blocks = blocks or [ReversibleBlock(_branch(), _branch()) for _ in range(3)]
    ends = (nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, network.num_classes))
    return nn.Sequential(ends[0], ReversibleSequential(blocks), *ends[1:])


def _drifting_net(network: NetworkSpec) -> nn.Module:
    return _net(network, [ReversibleBlock(nn.Sequential(_branch(), _Off()), _branch()) for _ in range(2)])


def _all_of(state: TrainState) -> dict[str, Any]:
    """Return everything that a checkpoint holds."""
    return copy.deepcopy({**shared_state(state), **rank_state(state)})


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": {"accumulate_steps": 2}, "training": {"amp": "bf16"}}],
    ids=["plain", "amp and parts"],
)
def test_metered_steps_change_no_state(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    states = []
    for every in (0, 1):
        training = {**changes.get("training", {}), "gradient_angle_meter": every}
        config = make_config(**{**changes, "training": training})
        states.append(_all_of(run(config, data, tmp_path / str(every), MemoryLog(), build=_net)))
    assert differences(*states) == []


def _start(build: Any, folder: Path, **changes: Any) -> TrainState:
    return start(task_of(make_config(**changes)), Process(), folder, build=build)


def _by_hand(model: nn.Module, images: Tensor, targets: Tensor, store: bool) -> Tensor:
    """Return the gradient of all parameters in float64, by a backward pass of a copy."""
    model = copy.deepcopy(model)
    model[1].store = store  # type: ignore[index]
    nn.functional.cross_entropy(model(images), targets).backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


def test_angle_equals_two_manual_backward_passes(tmp_path: Path) -> None:
    state = _start(_drifting_net, tmp_path, optimizer={"accumulate_steps": 1})
    state.model.double().train()
    for module in state.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    images, targets = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1] * 4)
    u, v = (_by_hand(state.model, images, targets, store) for store in (False, True))
    expected = math.degrees(math.acos(float(u @ v / u.norm() / v.norm())))
    assert expected > 1, "the network has to reconstruct badly"
    assert gradient_angle(state, StepBatch(images, targets, 8)) == pytest.approx(expected, rel=1e-6)


def test_meter_sums_gradients_like_step(tmp_path: Path) -> None:
    """Two parts of a batch, in one of which norms take their statistics, are summed as the step does it."""
    state = _start(_net, tmp_path, optimizer={"accumulate_steps": 2, "clip": 0, "batch_size": 8})
    state.wrapped_model.train()
    images, targets = torch.randn(8, 3, 8, 8), torch.tensor([0, 1] * 4)

    def losses() -> Any:
        for part, classes in zip(images.chunk(2), targets.chunk(2), strict=True):
            yield nn.functional.cross_entropy(state.model(part), classes, reduction="sum") / 8

    found = gradients(state.model, losses, store=False)
    train_step(state, StepBatch(images, targets, 8))
    for gradient, parameter in zip(found, state.model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


class _Noise(nn.Module):
    """Adds a random number of torch, numpy or Python."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw()


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())), "numpy": np.random.random, "Python": random.random,
}  # fmt: skip


@pytest.mark.parametrize("source", DRAWS)
def test_meter_restores_generators_and_buffers(source: str) -> None:
    model = nn.Sequential(_net(make_config().network), _Noise(DRAWS[source]))
    images, before = torch.randn(8, 3, 8, 8), copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    gradients(model, lambda: [model(images).square().sum()], store=False)
    assert differences(model.state_dict(), before) == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
