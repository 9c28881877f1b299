"""Lean training, reports and checks do not change what a network computes, whatever state it has."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.nn.utils import parametrizations, parametrize

import zoo
from tests.remat.programs import are_equal
from tests.step import step
from zoo.ops.recomputation import restore_buffers
from zoo.remat._lean import lean


class State(NamedTuple):
    """A state of a network.

    Args:
    - `turn`: replaces the state of a network and returns activations that depend on it.
    - `start`: returns the first state.
    - `reset`: cuts the history of the state after a step.
    - `has_history`: whether the state has a history within a step.
    """

    turn: Callable[[Any, Tensor], Tensor]
    start: Callable[[], Any] = lambda: None
    reset: Callable[[Any], object] = lambda model: None
    has_history: bool = False


class Stateful(nn.Module):
    """A network with a state, which is a buffer if it starts as a tensor."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        start = state.start()
        if isinstance(start, Tensor) and not isinstance(start, nn.Parameter):
            self.register_buffer("state", start)
        else:
            self.state = start
        self.turn, self.reset = state.turn, state.reset

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.out(self.turn(self, self.layer(x).relu()).tanh())
        return x.square()


def accumulate(model: Stateful, x: Tensor) -> Tensor:
    """Integrate like the membrane potential of a spiking neuron."""
    model.state = x if model.state is None else 0.5 * model.state + x
    return model.state


def detach(model: Stateful) -> None:
    model.state = model.state.detach()


def append(model: Stateful, x: Tensor) -> Tensor:
    model.state.append(x)
    return torch.stack([*model.state]).sum(0)


def append_mean(model: Stateful, x: Tensor) -> Tensor:
    model.state.append(x.detach().mean(0))
    return x + torch.stack(model.state).sum(0)


def normalize(model: Stateful, x: Tensor) -> Tensor:
    """Update a norm that `nn.Module.modules` does not find."""
    model.state[0](x)
    return x + model.state[0].running_mean


def accumulate_detached(model: Stateful, x: Tensor) -> Tensor:
    model.state = x.detach() if model.state is None else 0.5 * model.state + x.detach()
    return x + model.state


def overwrite(model: Stateful, x: Tensor) -> Tensor:
    """Overwrite a tensor that is not a buffer."""
    model.state["sum"][0] += x.detach().mean(0)
    return x + model.state["sum"][0].clone()


def count(model: Stateful, x: Tensor) -> Tensor:
    model.state += 1
    return x * float(model.state)


def iterate_through_data(model: Stateful, x: Tensor) -> Tensor:
    """Normalize a parameter through its data, like power iterations of spectral norms."""
    model.state.data = F.normalize(model.layer.weight.data @ model.state.data, dim=0)
    return x * model.state


def train_inside(model: Stateful, x: Tensor) -> Tensor:
    """Compute gradients in forward."""
    model.state.zero_grad()
    model.state(x.detach()).sum().backward()
    return x + model.state.weight.grad.detach()


def record_with_hook(model: Stateful, x: Tensor) -> Tensor:
    """Record outputs of a layer in a hook of the network."""
    if not hasattr(model, "is_recording"):
        model.is_recording = True
        model.layer.register_forward_hook(lambda module, args, output: model.state.append(output))
        model.state.append(x)
    return x + torch.stack(model.state).sum(0)


def low(x: Tensor) -> Tensor:
    return x.detach().amin(0)


def resize(model: Stateful, x: Tensor) -> Tensor:
    if model.state.numel() == 0:
        model.state.resize_(16).fill_(0)
    model.state.mul_(0.9).add_(low(x), alpha=0.1)
    return x - model.state


def shrink(model: Stateful, x: Tensor) -> Tensor:
    first = model.state[:1] + low(x)[:1]
    model.state.resize_(1).copy_(first)
    return x - model.state


def set_memory(model: Stateful, x: Tensor) -> Tensor:
    model.state.set_(low(x) + model.state.sum())
    return x - model.state


def rebind(model: Stateful, x: Tensor) -> Tensor:
    model.state.data = low(x).double() + model.state.sum()
    return x - model.state.float()


def observe(model: Stateful, x: Tensor) -> Tensor:
    return model.state(x) * model.state.max_val.clone()


def quantize(model: Stateful, x: Tensor) -> Tensor:
    return F.linear(x, model.state(model.layer.weight))


OBSERVERS: dict[str, State] = {
    "observer": State(observe, partial(PerChannelMinMaxObserver, ch_axis=1)),
    "moving observer": State(observe, partial(MovingAveragePerChannelMinMaxObserver, ch_axis=1)),
    "fused quantization": State(
        quantize,
        partial(FusedMovingAvgObsFakeQuantize, observer=MovingAveragePerChannelMinMaxObserver, ch_axis=0,
                dtype=torch.qint8, quant_min=-128, quant_max=127),
    ),
}  # fmt: skip
BUFFERS: dict[str, State] = {
    "resized buffer": State(resize, lambda: torch.zeros(0)),
    "shrunk buffer": State(shrink, lambda: torch.full((16,), -0.5)),
    "buffer with set_": State(set_memory, lambda: torch.full((0,), -0.5)),
    "buffer of another dtype": State(rebind, lambda: torch.full((0,), -0.5)),
    **OBSERVERS,
}
STATES: dict[str, State] = {
    "history": State(accumulate, reset=detach, has_history=True),
    "list": State(append, list, lambda model: model.state.clear(), has_history=True),
    "deque": State(
        append, partial(deque, maxlen=2), lambda model: model.state.extend([each.detach() for each in model.state]),
        has_history=True,
    ),
    "hook": State(record_with_hook, list, lambda model: model.state.clear(), has_history=True),
    "module in a list": State(normalize, lambda: [nn.BatchNorm1d(16)]),
    "detached": State(accumulate_detached),
    "growing list": State(append_mean, list),
    "overwritten tensor": State(overwrite, lambda: {"sum": [torch.zeros(16)]}),
    "counter": State(count, int),
    "array": State(count, partial(np.zeros, ())),
    "parameter through data": State(
        iterate_through_data, lambda: nn.Parameter(torch.ones(16), requires_grad=False)
    ),
    "inner backward": State(train_inside, lambda: nn.Linear(16, 1), lambda model: model.state.zero_grad()),
    **BUFFERS,
}  # fmt: skip
#: States that a check trains: their forward needs no reset.
CHECKED = ("module in a list", "detached", "overwritten tensor", "counter", "parameter through data", *BUFFERS)


def built(name: str) -> Stateful:
    torch.manual_seed(0)
    return Stateful({**STATES, **BUFFERS}[name])


def batch(seed: int = 0) -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))


def state_of(model: nn.Module) -> list[Tensor]:
    return [each.clone() for each in (*model.parameters(), *model.buffers())]


def history(name: str, prepare: Callable[[Stateful], object]) -> list[Tensor]:
    """Return the values of four training steps of a prepared network."""
    model = built(name)
    own = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model)
    assert all(a is b for a, b in zip(own, (*model.parameters(), *model.buffers()), strict=True))
    values: list[Tensor] = []
    for seed in range(4):
        values += [each.clone() for each in step(model, batch(seed))]
        optimizer.step()
        model.reset(model)
        values += state_of(model)
    return values


@pytest.fixture(scope="module")
def plain_histories() -> dict[str, list[Tensor]]:
    return {}


USES: dict[str, Callable[[Stateful], object]] = {
    "limit": partial(lean, budget="3GB"),
    "fraction": partial(lean, budget=0.3),
    "report": lambda model: zoo.memory_report(model, batch()),
    "check": lambda model: zoo.check(model, batch()),
}
CASES = [(name, use) for use in USES for name in (CHECKED if use == "check" else STATES)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.ao
@pytest.mark.parametrize(("name", "use"), CASES)
def test_network_with_state_is_bit_identical_to_plain_training(
    name: str, use: str, plain_histories: dict[str, list[Tensor]]
) -> None:
    if name not in plain_histories:
        plain_histories[name] = history(name, lambda _: None)
    assert are_equal(history(name, USES[use]), plain_histories[name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.ao
@pytest.mark.parametrize("name", BUFFERS)
def test_restored_buffers_get_size_contents_and_dtype_back(name: str) -> None:
    model = built(name)
    model(batch())
    own, before = list(model.buffers()), copy.deepcopy(list(model.buffers()))
    with restore_buffers(model):
        model(batch(1))
        for each in own:
            each.data = torch.ones(7, dtype=torch.float16)
    assert all(a is b for a, b in zip(own, model.buffers(), strict=True))
    assert are_equal(own, before)
    assert [each.dtype for each in own] == [each.dtype for each in before]


def test_lean_continues_history_of_user() -> None:
    def run(budget: str | None) -> list[Tensor]:
        model = built("history")
        loss = model(batch()).sum()
        if budget is not None:
            lean(model, budget)
        for seed in range(1, 4):  # truncated by nobody
            loss = loss + model(batch(seed)).sum()
        loss.backward()
        return [each.grad for each in model.parameters()]

    assert are_equal(run("3GB"), run(None))


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight norm as a hook": torch.nn.utils.weight_norm,
    "spectral norm as a hook": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("where", ["outside", "inside", "two calls"])
@pytest.mark.parametrize("norm", NORMS)
def test_cached_parametrizations_are_bit_identical_to_plain_training(norm: str, where: str) -> None:
    def run(budget: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(NORMS[norm](nn.Linear(16, 16)), nn.ReLU(), NORMS[norm](nn.Linear(16, 16)))
        if budget is not None:
            lean(model, budget)
        values: list[Tensor] = []
        for seed in range(4):
            model.zero_grad()
            with parametrize.cached():
                loss = model(batch(seed)).square().mean()
                if where == "two calls":
                    loss = loss + model(batch(seed).repeat(2, 1)).square().mean()
                if where == "inside":
                    loss.backward()
            if where != "inside":
                loss.backward()
            values += [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
            values += state_of(model)
        return values

    assert are_equal(run("3GB"), run(None))


def _clamps(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)


def _clamps_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def _renormalizes(weight: nn.Parameter) -> None:
    F.embedding(torch.arange(2), weight, max_norm=0.1)


def _halves_its_gradient(weight: nn.Parameter) -> None:
    if weight.grad is not None:
        weight.grad.mul_(0.5)


@pytest.mark.parametrize("budget", ["3GB", 0.3])
@pytest.mark.parametrize("write", [_clamps, _clamps_data, _renormalizes, _halves_its_gradient])
def test_overwritten_parameter_is_bit_identical_to_plain_training(
    write: Callable[[nn.Parameter], None], budget: float | str
) -> None:
    class Overwriting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            write(self.weight)
            return super().forward(x).sigmoid()

    results = []
    for train_lean in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), Overwriting(64, 64), nn.Linear(64, 4))
        model[1].weight.grad = torch.ones(64, 64)
        if train_lean:
            lean(model, budget)
        for _ in range(4):
            model(torch.randn(512, 16)).square().mean().backward()
        results.append([*(each.grad for each in model.parameters()), *(each.detach() for each in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("context", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_report_inside_of_autocast_leaves_no_casts_behind(context: Callable[[], AbstractContextManager[Any]]) -> None:
    def run(reports: bool) -> list[Tensor]:
        model = built("history")
        with context():
            if reports:
                zoo.memory_report(model, batch())
            loss = model(batch()).float().mean()
        loss.backward()
        return [loss.detach(), *(each.grad for each in model.parameters())]

    assert are_equal(run(True), run(False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_tensors_kept_by_compiler_are_not_history() -> None:
    torch._dynamo.reset()
    model = built("counter")
    model.layer = torch.compile(model.layer, backend="aot_eager")  # type: ignore[assignment]
    model(batch())
    zoo.memory_report(model, batch(1)[:32])
    zoo.check(built("detached"), batch(), variant=lambda module: torch.compile(module, backend="aot_eager"))
