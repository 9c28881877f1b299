"""Replicas refuse networks with state that neither checkpoints nor other processes get."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dist.spawn import run_distributed
from tests.engine.test_replicas import replicas_config
from tests.engine.tiny import MemoryLog, run
from zoo.config.experiment import Experiment
from zoo.config.network import NetworkSpec
from zoo.engine._attributes import attribute_values, changed_attribute
from zoo.errors import ConfigError


class Stateful(nn.Module):
    """Scales its input, and changes its ``state`` in each pass."""

    def __init__(self, state: Any, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.state, self._change = state, change

    def forward(self, x: Tensor) -> Tensor:
        self.state = self._change(self.state, x)
        return x * 0.5


def _changed(action: Callable[..., object]) -> Callable[[Any, Tensor], Any]:
    """Return a change of a state in place."""

    def change(state: Any, x: Tensor) -> Any:
        action(state, x)
        return state

    return change


STATES: dict[str, Callable[[], tuple[Any, Callable[[Any, Tensor], Any]]]] = {
    "counter": lambda: (0, lambda state, x: state + 1),
    "temperature": lambda: (1.0, lambda state, x: 0.99 * state),
    "running tensor": lambda: (torch.zeros(()), lambda state, x: 0.9 * state + 0.1 * x.detach().mean()),
    "tensor in place": lambda: (torch.zeros(3), _changed(lambda state, x: state.add_(1))),
    "array": lambda: (np.zeros(3), _changed(lambda state, x: np.add(state, 1, out=state))),
    "list": lambda: ([], _changed(lambda state, x: state.append(x.detach().mean()))),
    "full deque": lambda: (
        deque([0.0] * 2, maxlen=2),
        _changed(lambda state, x: state.append(float(x.detach().mean()))),
    ),
    "dict of dicts": lambda: ({"a": {"n": 0}}, _changed(lambda state, x: state["a"].update(n=state["a"]["n"] + 1))),
    "set": lambda: (set(), _changed(lambda state, x: state.add(len(state)))),
    "object": lambda: (SimpleNamespace(n=[0]), _changed(lambda state, x: state.n.append(1))),
    "iterator": lambda: (itertools.count(), _changed(lambda state, x: next(state))),
    "generator of torch": lambda: (torch.Generator(), _changed(lambda state, x: torch.rand(1, generator=state))),
    "generator of numpy": lambda: (np.random.default_rng(0), _changed(lambda state, x: state.random())),
    "generator of Python": lambda: (random.Random(0), _changed(lambda state, x: state.random())),
}


@pytest.mark.parametrize("name", STATES)
def test_changed_state_has_name_of_module_and_attribute(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Stateful(*STATES[name]())))
    before = attribute_values(model)
    assert changed_attribute(model, before) is None
    model(torch.ones(1, 2))
    assert changed_attribute(model, before) == "state of 1.0 (Stateful)"


def _fill_cache(state: dict[Any, Tensor], x: Tensor) -> None:
    if x.shape not in state:
        state[x.shape] = torch.arange(x.numel())


def test_attribute_of_network_itself_has_its_name() -> None:
    model = Stateful(0, lambda state, x: state + 1)
    before = attribute_values(model)
    model(torch.ones(1))
    model.new = 1
    assert changed_attribute(model, before) == "state of the network (Stateful)"


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(2), nn.Dropout(0.5), nn.LSTM(2, 2)], ids=lambda layer: type(layer).__name__
)
def test_buffers_and_torch_layers_do_not_count_as_changed_attributes(layer: nn.Module) -> None:
    layer.alias = next(layer.buffers(), None)
    before = attribute_values(layer)
    layer(torch.ones(4, 2))
    assert changed_attribute(layer, before) is None


def build_counting(network: NetworkSpec) -> nn.Module:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), Stateful(0, lambda state, x: state + 1))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, network.num_classes))


def build_caching(network: NetworkSpec) -> nn.Module:
    model = build_counting(network)
    model[0][1] = Stateful({}, _changed(_fill_cache))
    return model


def _train(config: Experiment, uneven_data: Path, folder: Path) -> str:
    try:
        run(config, uneven_data, folder, MemoryLog(), build=build_counting)
    except ConfigError as error:
        return str(error)
    return ""


MESSAGE = "forward changes the attribute state of 0.1 (Stateful); checkpoints and other processes do not get attributes"


@pytest.mark.parametrize(
    ("world_size", "replicas"),
    [(1, 1), (1, 4), *[pytest.param(2, replicas, marks=pytest.mark.dist) for replicas in (3, 2)]],
)
def test_every_process_refuses_changed_attribute(
    world_size: int, replicas: int, uneven_data: Path, tmp_path: Path
) -> None:
    """One of two processes with three replicas has a second pass in the first step, and the other has none."""
    arguments = replicas_config(replicas), uneven_data, tmp_path / "run"
    for message in [_train(*arguments)] if world_size == 1 else run_distributed(_train, world_size, *arguments):
        assert message.startswith(f"optimizer.replicas = {replicas}: {MESSAGE}")


def test_run_of_replicas_accepts_cache_by_shape(uneven_data: Path, tmp_path: Path) -> None:
    """The last batch of the epoch has another shape, for which the cache gets another entry."""
    state = run(replicas_config(4), uneven_data, tmp_path, MemoryLog(), build=build_caching)
    assert len(state.model[0][1].state) > 1
    assert state.step == 3
