"""Reports and checks do not change a network, so that training stays bit-identical."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

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
from zoo.remat.lean import lean


class WithBuffer(nn.Module):
    """A network whose forward replaces the memory of a buffer at each call."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("low", torch.full((size,), -0.5))
        self.low: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.update(x.detach().amin(0))
        return (x - self.low.float()).relu().square()

    def update(self, low: Tensor) -> None:
        raise NotImplementedError


class Resized(WithBuffer):
    def update(self, low: Tensor) -> None:
        if self.low.numel() == 0:
            self.low.resize_(16).fill_(0)
        self.low.mul_(0.9).add_(low, alpha=0.1)


class Shrunk(WithBuffer):
    def __init__(self) -> None:
        super().__init__(16)

    def update(self, low: Tensor) -> None:
        first = self.low[:1] + low[:1]
        self.low.resize_(1).copy_(first)


class Set(WithBuffer):
    def update(self, low: Tensor) -> None:
        self.low.set_(low + self.low.sum())


class Rebound(WithBuffer):
    def update(self, low: Tensor) -> None:
        self.low.data = low.double() + self.low.sum()


class Late(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", None)

    def update(self, low: Tensor) -> None:
        self.low = low if self.low is None else 0.9 * self.low + 0.1 * low


class QuantizedWeight(nn.Module):
    """A layer with a fused fake quantization of its weight, per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.quantize = FusedMovingAvgObsFakeQuantize(
            observer=MovingAveragePerChannelMinMaxObserver, ch_axis=0, dtype=torch.qint8, quant_min=-128, quant_max=127
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantize(self.layer.weight), self.layer.bias).relu().square()


class Observed(nn.Module):
    def __init__(self, observer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.observer = nn.Linear(16, 16), observer()

    def forward(self, x: Tensor) -> Tensor:
        out = self.observer(self.layer(x))
        observed = getattr(self.observer, "max_val", None)
        return (out if observed is None else out * observed).relu().square()


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "resized from no elements": Resized,
    "resized to fewer elements": Shrunk,
    "set_": Set,
    "set through data, to another dtype": Rebound,
    "None at first": Late,
    "per-channel observer": lambda: Observed(lambda: PerChannelMinMaxObserver(ch_axis=1)),
    "moving per-channel observer": lambda: Observed(lambda: MovingAveragePerChannelMinMaxObserver(ch_axis=1)),
    "fused fake quantization": QuantizedWeight,
}


def batch(seed: int = 0) -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))


def state_of(model: nn.Module) -> list[Tensor]:
    return [each.clone() for each in (*model.parameters(), *model.buffers())]


@pytest.fixture(params=BUFFERS)
def build(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return BUFFERS[request.param]()

    return built


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_replaced_buffer_is_bit_identical_to_plain_training(build: Callable[[], nn.Module]) -> None:
    plain, model = build(), lean(build(), "3GB")
    for seed in range(3):
        assert are_equal(step(plain, batch(seed)), step(model, batch(seed)))
        assert are_equal(plain.buffers(), model.buffers())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("use", [zoo.memory_report, zoo.check])
def test_report_and_check_change_no_buffers(build: Callable[[], nn.Module], use: Callable[..., Any]) -> None:
    model = build()
    own, before = list(model.buffers()), state_of(model)
    use(model, batch())
    assert all(a is b for a, b in zip(own, model.buffers(), strict=True))
    assert are_equal(before, state_of(model))
    assert [each.dtype for each in before] == [each.dtype for each in state_of(model)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_restored_buffers_get_size_contents_and_dtype_back(build: Callable[[], nn.Module]) -> None:
    model = build()
    model(batch())
    own, before = list(model.buffers()), copy.deepcopy(list(model.buffers()))
    with restore_buffers(model):
        model(batch(1))
        for each in own:
            each.data = torch.ones(7, dtype=torch.float16)
    assert all(a is b for a, b in zip(own, model.buffers(), strict=True))
    assert are_equal(own, before)
    assert [each.dtype for each in own] == [each.dtype for each in before]


@dataclass
class Memory:
    """An object that stores states."""

    states: list[Tensor] = field(default_factory=list)


class Stateful(nn.Module):
    """A network with a state that `turn` replaces, which forward adds to its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.out(self.turn(self.layer(x).relu()).tanh())
        return x.square()

    def turn(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def reset(self) -> None:
        """Cut the history, like users between steps."""


class Potential(Stateful):
    """A spiking neuron, whose membrane potential has a history."""

    def turn(self, x: Tensor) -> Tensor:
        self.state = x if self.state is None else 0.5 * self.state + x
        return self.state

    def reset(self) -> None:
        self.state = self.state.detach()


class Pair(Potential):
    def turn(self, x: Tensor) -> Tensor:
        before = x if self.state is None else self.state[1]
        self.state = before.sin(), before + x
        return self.state[0]

    def reset(self) -> None:
        self.state = tuple(each.detach() for each in self.state)


class States(Stateful):
    """Stores states with a history in a container, and drops them after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.container()

    def container(self) -> Any:
        return []

    def turn(self, x: Tensor) -> Tensor:
        self.state.append(x)
        return torch.stack(list(self.state)).sum(0)

    def reset(self) -> None:
        self.state.clear()


class Deque(States):
    def container(self) -> Any:
        return deque(maxlen=2)

    def reset(self) -> None:
        self.state.extend([each.detach() for each in self.state])


class Dict(States):
    def container(self) -> Any:
        return OrderedDict(first=None)

    def turn(self, x: Tensor) -> Tensor:
        self.state[len(self.state)] = x
        return x * len(self.state)


class Object(States):
    def container(self) -> Any:
        return SimpleNamespace(memory=Memory())

    def turn(self, x: Tensor) -> Tensor:
        self.state.memory.states.append(x)
        return torch.stack(self.state.memory.states).sum(0)

    def reset(self) -> None:
        self.state.memory.states = []


class Hidden(States):
    """Keeps a network where `nn.Module.modules` does not find it."""

    def container(self) -> Any:
        return [nn.BatchNorm1d(16)]

    def turn(self, x: Tensor) -> Tensor:
        self.state[0](x)
        return x + self.state[0].running_mean

    def reset(self) -> None:
        pass


class Detached(Stateful):
    def turn(self, x: Tensor) -> Tensor:
        self.state = x.detach() if self.state is None else 0.5 * self.state + x.detach()
        return x + self.state


class MemoryBank(States):
    def turn(self, x: Tensor) -> Tensor:
        self.state.append(x.detach().mean(0))
        return x + torch.stack(self.state).sum(0)

    def reset(self) -> None:
        pass


class Overwritten(Stateful):
    """Overwrites a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"sum": [torch.zeros(16)]}

    def turn(self, x: Tensor) -> Tensor:
        self.state["sum"][0] += x.detach().mean(0)
        return x + self.state["sum"][0].clone()


class Counter(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.state = 0

    def turn(self, x: Tensor) -> Tensor:
        self.state += 1
        return x * self.state


class Array(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.state = np.zeros(1)

    def turn(self, x: Tensor) -> Tensor:
        self.state += 1
        return x * float(self.state[0])


class Warmup(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"late"}

    def turn(self, x: Tensor) -> Tensor:
        self.seen.add("early" if "late" in self.seen else "none")
        self.seen.discard("late")
        return x * len(self.seen | {"late"})


class ThroughData(Stateful):
    """Normalizes a parameter through its data, like power iterations of spectral norms."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(16), requires_grad=False)

    def turn(self, x: Tensor) -> Tensor:
        self.vector.data = F.normalize(self.layer.weight.data @ self.vector.data, dim=0)
        return x * self.vector


class InnerBackward(Stateful):
    """Computes gradients in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 1)

    def turn(self, x: Tensor) -> Tensor:
        self.inner.zero_grad()
        self.inner(x.detach()).sum().backward()
        return x + self.inner.weight.grad.detach()

    def reset(self) -> None:
        self.inner.zero_grad()


FEATURES: dict[str, Any] = {}


class Hooked(Stateful):
    """Adds values that hooks have recorded to its activations."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.records: Any = [] if kind == "closure" else FEATURES
        records = self.records

        def append(module: nn.Module, args: Any, output: Tensor) -> None:
            records.append(output)

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            FEATURES.setdefault("outputs", []).append(output)

        self.layer.register_forward_hook({"closure": append, "global": note, "method": self.note}[kind])

    def note(self, *args: Any) -> None:
        self.records.setdefault("outputs", []).append(args[-1])

    def turn(self, x: Tensor) -> Tensor:
        records = self.records if isinstance(self.records, list) else self.records["outputs"]
        return x + torch.stack(records).sum(0)

    def reset(self) -> None:
        self.records.clear()


STATEFUL: dict[str, Callable[[], Stateful]] = {
    **{
        each.__name__: each
        for each in (
            Potential, Pair, States, Deque, Dict, Object, Hidden, Detached, MemoryBank, Overwritten, Counter, Array,
            Warmup, ThroughData, InnerBackward,
        )
    },
    **{f"hook with a {kind}": lambda kind=kind: Hooked(kind) for kind in ("closure", "global", "method")},
}  # fmt: skip


@pytest.fixture(params=STATEFUL)
def stateful(request: pytest.FixtureRequest) -> Iterator[Callable[[], Stateful]]:
    def built() -> Stateful:
        FEATURES.clear()
        torch.manual_seed(0)
        return STATEFUL[request.param]()

    yield built
    FEATURES.clear()


def trained(model: Stateful, optimizer: torch.optim.Optimizer, seed: int) -> list[Tensor]:
    """Return the values of a training step that ends with a reset of the state."""
    values = step(model, batch(seed))
    optimizer.step()
    model.reset()
    return [*(each.clone() for each in values), *state_of(model)]


def history(build: Callable[[], Stateful], prepare: Callable[[Stateful], Any]) -> list[Tensor]:
    """Return the values of four training steps of a prepared network."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model)
    return [value for seed in range(4) for value in trained(model, optimizer, seed)]


@pytest.mark.parametrize("budget", ["3GB", 0.3])
def test_state_outside_of_buffers_is_bit_identical_to_plain_training(
    stateful: Callable[[], Stateful], budget: float | str
) -> None:
    assert are_equal(history(stateful, lambda model: lean(model, budget)), history(stateful, lambda _: None))


#: Their hooks change variables outside of the network, which a copy of the network shares.
OUTSIDE = ("hook with a closure", "hook with a global")


@pytest.mark.parametrize("stateful", sorted({*STATEFUL} - {*OUTSIDE}), indirect=True)
def test_report_changes_no_state_of_network(stateful: Callable[[], Stateful]) -> None:
    found = history(stateful, lambda model: zoo.memory_report(model, batch()))
    assert are_equal(found, history(stateful, lambda _: None))


@pytest.mark.parametrize("build", [Dict, Hidden, Detached, MemoryBank, Overwritten, Counter, Warmup, ThroughData])
def test_check_changes_no_state_of_network(build: Callable[[], Stateful]) -> None:
    assert are_equal(history(build, lambda model: zoo.check(model, batch())), history(build, lambda _: None))


def test_lean_continues_history_of_user() -> None:
    def run(budget: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Potential()
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
        torch.manual_seed(0)
        model = Potential()
        with context():
            if reports:
                zoo.memory_report(model, batch())
            loss = model(batch()).float().mean()
        loss.backward()
        return [loss.detach(), *(each.grad for each in model.parameters())]

    assert are_equal(run(True), run(False))


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_tensors_kept_by_compiler_are_not_history() -> None:
    torch._dynamo.reset()
    model = Counter()
    model.layer = torch.compile(model.layer, backend="aot_eager")  # type: ignore[assignment]
    model(batch())
    zoo.memory_report(model, batch(1)[:32])
    zoo.check(Detached(), batch(), variant=lambda module: torch.compile(module, backend="aot_eager"))
