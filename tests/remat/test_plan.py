"""Plans save and recompute what they predict, and training that follows them is bit-identical to plain training."""

from __future__ import annotations

import copy
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from tests.remat.programs import (
    NETWORKS,
    FrozenBody,
    are_equal,
    build,
    images,
    network,
    state_of,
    train_steps,
)
from zoo.memory.allocations import measure_memory
from zoo.remat._limit import NUM_FORGIVEN, BelowFloor, Measurement
from zoo.remat._plan import MAX_WORK, Block, Graph, Operation, Plan, Planner, _Backward, _MinimumCut


def random_graph(seed: int, num_blocks: int = 9) -> Graph:
    """Return a graph in which each operation computes one or two blocks from up to two earlier ones."""
    chance = random.Random(seed)
    graph = Graph()
    for index in range(num_blocks):
        block = Block(chance.randint(1, 20))
        kind = chance.random() if index else 0.0
        if kind < 0.1:
            block.is_permanent = index > 0 and chance.random() < 0.5
        elif kind > 0.85 and graph.operations:
            block.operation = len(graph.operations) - 1
        else:
            candidates = [each for each in range(index) if not graph.blocks[each].is_permanent]
            sources = tuple(sorted(chance.sample(candidates, min(len(candidates), chance.randint(1, 2)))))
            block.operation = len(graph.operations)
            is_in_place = chance.random() < 0.3
            if is_in_place and sources:
                block.size = graph.blocks[sources[0]].size
            graph.operations.append(Operation(sources, chance.randint(1, 20), is_in_place))
        block.is_overwritten = not block.is_permanent and index < num_blocks - 1 and chance.random() < 0.15
        graph.blocks.append(block)
        graph.block_of.append(index)
    graph.packs = sorted(chance.choices(range(num_blocks), k=num_blocks))
    return graph


def chain_graph(num_layers: int = 12) -> Graph:
    """Return the graph of products, each followed by a cheap operation."""
    graph = Graph(blocks=[Block(8)], packs=[0])
    for index in range(2 * num_layers):
        graph.blocks.append(Block(8 if index % 2 else 10, operation=index))
        graph.operations.append(Operation((index,), 1.0 if index % 2 else 20.0, is_in_place=False))
        graph.packs.append(index + 1)
    graph.block_of = list(range(len(graph.blocks)))
    return graph


def needed(graph: Graph) -> set[int]:
    return {each for each in graph.packs if not graph.blocks[each].is_permanent}


def repeated(graph: Graph, saved: frozenset[int] | set[int]) -> set[int] | None:
    """Return the operations to repeat if these blocks are saved; None if a block cannot be recomputed."""
    found: set[int] = set()
    pending = [each for each in needed(graph) if each not in saved]
    while pending:
        operation = graph.blocks[pending.pop()].operation
        if operation is None:
            return None
        if operation not in found:
            found.add(operation)
            pending += [each for each in graph.operations[operation].sources if each not in saved]
    return found


def price(graph: Graph, saved: frozenset[int] | set[int], rate: float, until: int | None, then: float) -> float:
    """Return the bytes of the saved blocks and the price of recomputation; infinity if it is impossible."""
    operations = repeated(graph, saved)
    if operations is None:
        return math.inf
    costs = {each: graph.operations[each].cost for each in operations}
    work = sum(cost * (rate if until is None or each < until else then) for each, cost in costs.items())
    return sum(graph.blocks[each].size for each in saved) + work


def subsets(blocks: Sequence[int]) -> Iterator[set[int]]:
    for size in range(len(blocks) + 1):
        yield from map(set, itertools.combinations(blocks, size))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("is_split", [False, True])
def test_cut_is_cheapest_choice(seed: int, is_split: bool) -> None:
    graph = random_graph(seed)
    planner = Planner(graph)
    cut = _MinimumCut(planner)
    own = needed(graph)
    choices = [
        index
        for index, each in enumerate(graph.blocks)
        if not each.is_permanent and (index in own or not each.is_overwritten)
    ]
    until = len(graph.operations) // 2 if is_split else None
    for rate in (0.0, 0.25, 1.0, 4.0):
        saved = cut.saved(rate, until, 2 * rate)
        assert saved <= set(choices)
        best = min(price(graph, each, rate, until, 2 * rate) for each in subsets(choices))
        assert price(graph, saved, rate, until, 2 * rate) == pytest.approx(best)


class Simulation:
    """Runs the backward pass of a plan with sizes in place of tensors, block by block."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.reads = [graph.packs[position] for position in graph.order]
        self.stored: set[int] = set()
        self.cost = 0.0
        self.before: list[int] = []
        self.during: list[int] = []
        self.after: list[int] = []
        for time in range(len(self.reads)):
            self._read(time)

    def _read(self, time: int) -> None:
        target, sizes = self.reads[time], [each.size for each in self.graph.blocks]
        saved = sum(sizes[each] for each in self.plan.saved if self._is_held(each, time))
        before = saved + sum(sizes[each] for each in self.stored)
        order = sorted(self._missing(target))
        uses = {target: 1}
        for block in order:
            for source in self._sources(block):
                uses[source] = uses.get(source, 0) + 1
        live, most, fresh = before, before, set()
        for block in order:
            ended = []
            for source in self._sources(block):
                uses[source] -= 1
                if uses[source] == 0 and source in fresh and source not in self.plan.stored[time]:
                    ended.append(source)
            index = self.graph.blocks[block].operation
            assert index is not None
            overwritten = [each for each in ended if sizes[each] == sizes[block] and each == self._sources(block)[0]]
            if self.graph.operations[index].is_in_place:
                live -= sum(sizes[each] for each in overwritten)
                ended = [each for each in ended if each not in overwritten]
            live += sizes[block]
            most = max(most, live)
            live -= sum(sizes[each] for each in ended)
            fresh.add(block)
        operations = {self.graph.blocks[each].operation for each in order}
        self.cost += sum(self.graph.operations[each].cost for each in operations if each is not None)
        self.stored |= self.plan.stored[time]
        self.before.append(before)
        self.during.append(most)
        freed = self.plan.freed[time] & self.stored
        # What the node of backward has read lives until the node has run.
        self.after.append(live - sum(sizes[each] for each in freed - {target}))
        self.stored -= freed

    def _sources(self, block: int) -> tuple[int, ...]:
        operation = self.graph.blocks[block].operation
        return () if operation is None else self.graph.operations[operation].sources

    def _is_at_hand(self, block: int) -> bool:
        return block in self.plan.saved or block in self.stored or self.graph.blocks[block].is_permanent

    def _missing(self, block: int) -> set[int]:
        """Return the blocks to recompute for one."""
        if self._is_at_hand(block):
            return set()
        return {block}.union(*map(self._missing, self._sources(block)))

    def _is_held(self, block: int, time: int) -> bool:
        """Return whether a read from this time on may need a saved block."""
        return any(self._needs(read, block) for read in self.reads[time:])

    def _needs(self, read: int, block: int) -> bool:
        if read == block:
            return True
        return read not in self.plan.saved and any(self._needs(each, block) for each in self._sources(read))


def test_next_cut_continues_flow() -> None:
    for seed in range(20):
        planner = Planner(random_graph(seed, num_blocks=20))
        cut = _MinimumCut(planner)
        for rate in (0.0, 0.5, 1.0, 2.0):
            for until in (16, 8, 0):
                assert cut.saved(rate, until, rate + 0.25) == _MinimumCut(planner).saved(rate, until, rate + 0.25)


def check_prediction(graph: Graph, plan: Plan) -> None:
    found = Simulation(graph, plan)
    assert found.stored == set()
    assert list(plan.before) == found.before
    assert list(plan.during) == found.during
    assert all(ours >= theirs for ours, theirs in zip(plan.after, found.after, strict=True))
    assert plan.live == max(found.during, default=0)
    assert plan.cost == pytest.approx(found.cost)
    assert plan.saved_bytes >= max(found.before[:1], default=0)


@pytest.mark.parametrize("seed", range(20))
def test_predicted_bytes_equal_bytes_of_backward(seed: int) -> None:
    graph = random_graph(seed, num_blocks=14)
    for plan in Planner(graph).front:
        check_prediction(graph, plan)


def test_predicted_bytes_of_chain_equal_bytes_of_backward() -> None:
    graph = chain_graph()
    front = Planner(graph).front
    assert len(front) > 8
    for plan in front:
        check_prediction(graph, plan)


def trunk_graph(num_blocks: int) -> Graph:
    """Return the graph of residual blocks: a product, a cheap operation, and the addition to the trunk."""
    graph = Graph(blocks=[Block(8)], packs=[0])
    trunk = 0
    for index in range(num_blocks):
        start = len(graph.blocks)
        for sources, cost in (((trunk,), 20.0), ((start,), 1.0), ((trunk, start + 1), 1.0)):
            graph.blocks.append(Block(8, operation=len(graph.operations)))
            graph.operations.append(Operation(sources, cost, is_in_place=False))
        graph.packs += [start, start + 1] if index % 2 else [start + 1, start + 2]
        trunk = start + 2
    graph.block_of = list(range(len(graph.blocks)))
    return graph


def test_least_plan_may_save_nothing() -> None:
    graph = Graph(blocks=[Block(8, operation=0), Block(8, operation=1)], packs=[0, 1], smallest_bytes=1)
    graph.operations += [Operation((), 1.0, is_in_place=False), Operation((0,), 1.0, is_in_place=False)]
    plan = Planner(graph).least
    assert (plan.saved_bytes, plan.live) == (0, 16)


@pytest.mark.parametrize(("num_tracked", "saved_bytes"), [(3, 0), (8, 0), (9, 16), (50, 16)])
def test_plan_that_saves_little_per_tracked_tensor_recomputes_nothing(num_tracked: int, saved_bytes: int) -> None:
    graph = Graph(blocks=[Block(8, operation=0), Block(8, operation=1)], packs=[0, 1], smallest_bytes=1)
    graph.operations += [Operation((), 1.0, is_in_place=False), Operation((0,), 1.0, is_in_place=False)]
    graph.block_of = [0, 1] + [1] * (num_tracked - 2)  # views of the last block
    planner = Planner(graph)
    assert (planner.least.saved_bytes, planner.least.cost > 0) == (saved_bytes, saved_bytes == 0)
    graph.smallest_bytes = 0
    assert Planner(graph).least.saved_bytes == 0


def test_branches_are_recomputed_when_trunk_needs_them() -> None:
    graph = trunk_graph(16)
    (plan,) = (_Backward(Planner(graph), frozenset({0})).fastest.plan() for _ in range(1))
    check_prediction(graph, plan)
    first = next(time for time, stored_after in enumerate(plan.stored) if stored_after)
    stored = sum(graph.blocks[each].size for each in plan.stored[first])
    assert plan.during[first] - stored <= 4 * 8


@pytest.mark.parametrize(("num_layers", "share"), [(12, 0.35), (24, 0.25), (48, 0.2)])
def test_floor_of_chain_falls_with_its_length(num_layers: int, share: float) -> None:
    planner = Planner(chain_graph(num_layers))
    assert planner.front[-1].live <= share * planner.plain_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("resnet50", 0.17), ("densenet121", 0.15), ("efficientnet_b0", 0.15), ("vgg13", 0.45)]
)
def test_floors_of_networks(name: str, share: float) -> None:
    torch.manual_seed(0)
    planner = planner_of(zoo.lean(getattr(torchvision.models, name)(), 0.4), torch.randn(2, 3, 128, 128))
    assert planner.front[-1].live <= share * planner.plain_bytes


@pytest.fixture(scope="module")
def recorded() -> dict[str, Planner]:
    """Name -> the planner of a network."""
    return {name: planner_of(zoo.lean(build(name)[0], 0.4), build(name)[1]) for name in NETWORKS}


def kind_of(model: nn.Module) -> Any:
    """Return the record of the last kind of passes of a lean network."""
    return next(reversed(vars(model)["_zoo_lean"].limiter._kinds.values()))


def planner_of(model: nn.Module, x: Tensor) -> Planner:
    model(x).sum().backward()
    planner: Planner = kind_of(model).planner
    return planner


def plan_of(model: nn.Module) -> Plan:
    """Return the plan that a network with a fraction as its budget follows."""
    plan: Plan = vars(model)["_zoo_lean"].limiter._plan(kind_of(model).planner)
    return plan


@pytest.mark.parametrize("name", NETWORKS)
def test_predicted_bytes_of_networks_equal_bytes_of_backward(name: str, recorded: dict[str, Planner]) -> None:
    planner = recorded[name]
    for plan in planner.front:
        check_prediction(planner.graph, plan)


@pytest.mark.parametrize("name", NETWORKS)
def test_pareto_front_is_monotonic(name: str, recorded: dict[str, Planner]) -> None:
    planner = recorded[name]
    for faster, smaller in pairwise(planner.front):
        assert smaller.live < faster.live
        assert smaller.cost >= faster.cost
    assert planner.front[0].cost == 0
    assert planner.front[-1].cost <= MAX_WORK * planner.forward_cost
    assert planner.front[0].saved_bytes == planner.plain_bytes


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
@pytest.mark.parametrize("name", ["residual", "encoder"])
def test_smaller_fraction_holds_less_and_takes_longer(name: str) -> None:
    model, x = build(name)
    planner = planner_of(zoo.lean(model, 0.5), x)
    limiter = vars(model)["_zoo_lean"].limiter
    before = None
    for percent in range(99, 0, -1):
        limiter._share = percent / 100
        plan = limiter._plan(planner)
        assert plan.live <= max(limiter._share * planner.plain_bytes, planner.front[-1].live)
        assert before is None or (plan.live <= before.live and plan.cost >= before.cost)
        before = plan


def test_equal_networks_are_planned_once() -> None:
    first, second, other = (
        planner_of(zoo.lean(build("encoder")[0], 0.4), torch.randn(rows, 80, 64)) for rows in (4, 4, 8)
    )
    assert first is second
    assert first is not other


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
def test_plans_of_equal_networks_are_bit_identical() -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        plain, x = network(), images(48)
        assert_same_training(plain, 0.3, lambda model, _, x=x: model(x))


def clear(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad = None


class Cells(nn.Module):
    """Runs a recurrent cell for some steps, each of which reads a part of the input.

    Args:
    - `begins`: called with the steps of the input, and returns a step's.
    """

    def __init__(self, kind: str, width: int, begins: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.begins = getattr(nn, kind)(width, 64), begins

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in range(50):
            state = self.cell(self.begins(x, step), state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_part_of_small_input_is_not_recomputed(kind: str) -> None:
    x = torch.randn(50, 64, 4)
    planner = planner_of(zoo.lean(Cells(kind, 4, lambda x, step: x[0]), 0.3), x)
    (block,) = (each for each in planner.graph.blocks if each.size == x.nbytes)
    assert block.operation is None


class Parts(nn.Module):
    """Overwrites parts of tensors that later operations read.

    Args:
    - `write`: called with a tensor that may be overwritten.
    """

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.write = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), write

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.write(F.gelu(layer(x)).clone()).sigmoid()
        return x


def write_rows(x: Tensor) -> Tensor:
    x[:8] *= 2
    return x.sin()


def write_after_read(x: Tensor) -> Tensor:
    y = x.exp()
    x[:, ::2].zero_()
    return x * y


def write_parts_in_turn(x: Tensor) -> Tensor:
    first, second = x.unsafe_chunk(2, 1)
    return torch.cat((first.sigmoid_() * second.tanh_(), second), 1)


#: What a step of a cell reads of the input.
READS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "parts": lambda x, step: x[step],
    "one part": lambda x, step: x[0],
    "computed": lambda x, step: x[step].cos(),
}
CELLS = [*(("LSTMCell", name) for name in READS), ("GRUCell", "parts"), ("RNNCell", "parts")]
#: Name -> a network, its input, and fractions.
HELD: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], tuple[float | None, ...]]] = {
    **{name: (partial(build, name), (None, 0.6, 0.4, 0.2)) for name in NETWORKS},
    **{
        f"{kind} that reads {name}": (lambda k=kind, r=name: (Cells(k, 64, READS[r]), torch.randn(50, 128, 64)), (0.3,))
        for kind, name in CELLS
    },
    **{
        write.__name__: (lambda write=write: (Parts(write), torch.randn(512, 64)), (None, 0.6, 0.3))
        for write in (write_rows, write_after_read, write_parts_in_turn)
    },
}


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
@pytest.mark.parametrize(("name", "share"), [(name, share) for name in HELD for share in HELD[name][1]])
def test_predicted_bytes_are_held(name: str, share: float | None) -> None:
    model, x = HELD[name][0]()
    zoo.lean(model, share)
    for _ in range(2):
        model(x).sum().backward()
        clear(model)
    held = measure_memory(lambda: model(x).sum(), model.parameters(), warmup=0).held
    kind = kind_of(model)
    assert kind.num_departures == 0
    blocks, plan = kind.planner.graph.blocks, plan_of(model)
    has_input = any(blocks[each].operation is None and blocks[each].size == x.nbytes for each in plan.saved)
    assert held == pytest.approx(plan.saved_bytes - has_input * x.nbytes, rel=0.02)


@pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")
def test_peak_of_recomputed_branches_is_predicted() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).sin()
            return x

    torch.manual_seed(0)
    model, x = zoo.lean(Branches(), 0.3), torch.randn(4096, 64)
    for _ in range(2):
        model(x).sum().backward()
        clear(model)
    peak = measure_memory(lambda: model(x).sum(), model.parameters(), warmup=0).peak_without_gradients
    assert peak <= plan_of(model).live + 3 * x.nbytes  # gradients of x and of its two terms


def assert_same_training(
    plain: nn.Module,
    budget: float | str | None,
    run: Callable[[nn.Module, int], Tensor],
    **options: Any,
) -> None:
    """Assert that a copy of a network within a budget trains as the network itself does, bit for bit."""
    model = zoo.lean(copy.deepcopy(plain), budget)
    found = train_steps(model, lambda number: run(model, number), **options)
    expected = train_steps(plain, lambda number: run(plain, number), **options)
    assert all(bool(each.isfinite().all()) for each in expected)
    assert are_equal(found, expected)


below_floor = pytest.mark.filterwarnings("ignore::zoo.remat._limit.BelowFloor")


def run_in_autocast(model: nn.Module, x: Tensor, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def run_with_evaluation(model: nn.Module, x: Tensor, number: int) -> Tensor:
    model.eval()
    with torch.no_grad() if number % 2 else torch.inference_mode():
        model(x)
    if number == 2:
        model(x).square().mean().backward()
    model.train()
    return model(x)


#: Name -> a training step up to its output, and options of the steps.
TRAINING: dict[str, tuple[Callable[[nn.Module, Tensor, int], Tensor], dict[str, Any]]] = {
    "plain steps": (lambda model, x, _: model(x), {}),
    "accumulated gradients": (lambda model, x, _: model(x), {"is_accumulating": True}),
    "autocast": (run_in_autocast, {}),
    "evaluation between steps": (run_with_evaluation, {}),
}


#: Networks, kinds of steps and fractions.
CASES = [
    *((name, "plain steps", share) for name in NETWORKS for share in (None, 0.6, 0.3, 0.01)),
    *((name, training, 0.3) for name in ("residual", "encoder") for training in list(TRAINING)[1:]),
]


@below_floor
@pytest.mark.parametrize(("name", "training", "share"), CASES)
def test_training_is_bit_identical_to_plain_training(name: str, training: str, share: float | None) -> None:
    plain, x = build(name)
    run, options = TRAINING[training]
    assert_same_training(plain, share, lambda model, number: run(model, x, number), **options)


@below_floor
@pytest.mark.parametrize("name", ["residual", "encoder"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_is_bit_identical_to_plain_training(name: str, use_reentrant: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = build(name)[0]

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(x) + F.softplus(x)
            return checkpoint(self.body, x, use_reentrant=use_reentrant).sigmoid()

    x = build(name)[1].requires_grad_()
    assert_same_training(Inner(), 0.3, lambda model, _: model(x))


@below_floor
def test_frozen_layers_are_bit_identical_to_plain_training() -> None:
    x = images(48)
    assert_same_training(FrozenBody(), 0.2, lambda model, _: model(x))


@below_floor
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "efficientnet_b0", "convnext_tiny", "swin_t"])
def test_training_of_whole_networks_is_bit_identical_to_plain_training(name: str) -> None:
    torch.manual_seed(0)
    plain, x = getattr(torchvision.models, name)(), torch.randn(2, 3, 64, 64)
    assert_same_training(plain, 0.3, lambda model, _: model(x))


class Changing(nn.Module):
    """A network whose operations may depend on the number of the step.

    Args:
    - `body`: called with the network, the features and the number of the step.
    """

    def __init__(self, body: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.body, self.number = body, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.softplus(self.body(self, x, self.number)).sin()).tanh()


def features(rows: int = 320) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(rows, 64)


def two_of(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(self.first(x)), self.second(x).tanh()


def alpha(self: Any, x: Tensor, number: int) -> Tensor:
    u, v = two_of(self, x)
    return torch.add(u, v, alpha=1 + number).exp().sin()


def swapped(self: Any, x: Tensor, number: int) -> Tensor:
    u, v = two_of(self, x)
    return (u - v if number % 2 else v - u).sigmoid() * (v / (1 + u.square()))


def shorter(self: Any, x: Tensor, number: int) -> Tensor:
    x = F.gelu(self.first(x))
    return x.sigmoid() if number == 2 else x.exp().sigmoid()


def branch(self: Any, x: Tensor, number: int) -> Tensor:
    return F.silu(self.first(x)) if number % 2 else self.second(F.gelu(self.first(x))).sigmoid()


def with_data(model: Any, number: int) -> Tensor:
    if number == 2:
        model.first.weight.data = torch.full((64, 64), 0.01)
    return model(features())


def with_inputs_of_other_kinds(model: Any, number: int) -> Tensor:
    x = features()
    kinds = [x, x, x.double().float(), x.t().contiguous().t(), x.clone().requires_grad_(), torch.cat((x, x))[:320]]
    return model(kinds[number])


def with_two_calls(model: Any, number: int) -> Tensor:
    return model(features()) * model(features().flip(0))


def with_calls_in_a_row(model: Any, number: int) -> Tensor:
    return model(model(features()) if number % 2 else features())


def with_unused_output(model: Any, number: int) -> Tensor:
    model(features())
    return model(features())


def with_gradients_of_part(model: Any, number: int) -> Tensor:
    out = model(features())
    torch.autograd.grad(out.sum(), model.third.weight, retain_graph=True)
    return out


def with_backward_in_call(model: Any, number: int) -> Tensor:
    model(features()).square().mean().backward()
    return model(features())


USES = [
    *(with_data, with_inputs_of_other_kinds, with_two_calls, with_calls_in_a_row),
    *(with_unused_output, with_gradients_of_part, with_backward_in_call),
]


@below_floor
@pytest.mark.parametrize("budget", [None, 0.3, "4MB"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_changing_use_is_bit_identical_to_plain_training(
    use: Callable[..., Tensor], budget: float | str | None
) -> None:
    assert_same_training(Changing(swapped), budget, use, num_steps=6)


@below_floor
@pytest.mark.parametrize("budget", [None, 0.3])
def test_pass_that_departs_from_plan_is_recorded_again(budget: float | None) -> None:
    model, x = zoo.lean(Changing(shorter), budget), features()
    found = []
    for number in range(5):
        model.number = number
        model(x).sum().backward()
        clear(model)
        kind = kind_of(model)
        found.append((kind.planner is not None, kind.num_departures))
    assert found == [(True, 0), (True, 0), (False, 1), (True, 1), (True, 1)]


@below_floor
@pytest.mark.parametrize("budget", [None, 0.3])
def test_passes_that_always_depart_from_plan_have_none(budget: float | None) -> None:
    model, x = zoo.lean(Changing(branch), budget), features()
    for number in range(12):
        model.number = number
        model(x).sum().backward()
        clear(model)
    kind = kind_of(model)
    assert kind.planner is None
    assert kind.num_departures == 3


def test_rare_departures_are_forgiven() -> None:
    model, x = zoo.lean(Changing(branch)), features()
    for number in range(5 * NUM_FORGIVEN * 2):
        model.number = number // (NUM_FORGIVEN * 2)
        model(x).sum().backward()
        clear(model)
    assert kind_of(model).planner is not None


def dense() -> nn.Module:
    """Return a dense block, whose concatenations are made of small tensors."""
    torch.manual_seed(0)
    return torchvision.models.densenet.DenseNet(4, (6,), 8, 1, num_classes=3)


#: Name -> a network, its input, and the most bytes that its second step holds, of plain training and of the first step.
SHARES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], float, float]] = {
    "dense": (dense, lambda: images(128), 0.3, 1.05),
    "encoder": (NETWORKS["encoder"][0], NETWORKS["encoder"][1], 0.45, 0.9),
    "residual": (NETWORKS["residual"][0], NETWORKS["residual"][1], 0.6, 1.05),
}


@pytest.mark.parametrize("name", SHARES)
def test_second_step_without_budget_holds_least(name: str) -> None:
    build_one, inputs, share, share_of_first = SHARES[name]
    plain, x = build_one(), inputs()
    model = zoo.lean(copy.deepcopy(plain))
    steps = [measure_memory(lambda: model(x).sum(), model.parameters(), warmup=0) for _ in range(3)]
    expected = measure_memory(lambda: plain(x).sum(), plain.parameters())
    assert steps[1].held <= share * expected.held
    assert steps[1].held <= share_of_first * steps[0].held
    assert steps[2].held == steps[1].held


@below_floor
@pytest.mark.parametrize("budget", [None, 0.3, "4MB"])
def test_interleaved_networks_are_bit_identical_to_plain_training(budget: float | str | None) -> None:
    plain = nn.ModuleList([Changing(swapped), Changing(alpha)])
    model = copy.deepcopy(plain)
    for each in model:
        zoo.lean(each, budget)
    results = []
    for first, second in (plain, model):

        def run(number: int, first: Any = first, second: Any = second) -> Tensor:
            second.number = number
            outputs = first(features()), second(features())
            return outputs[0] * outputs[1] + first(outputs[1])

        results.append(train_steps(nn.ModuleList([first, second]), run))
    assert are_equal(*results)


@below_floor
@pytest.mark.parametrize("budget", [None, 0.3, "4MB"])
def test_threads_are_bit_identical_to_plain_training(budget: float | str | None) -> None:
    def build_one(index: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Sigmoid())))

    plain = [build_one(index) for index in range(2)]
    models = [zoo.lean(copy.deepcopy(each), budget) for each in plain]
    x, errors = features(), []

    def train(module: nn.Module) -> None:
        try:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
            for _ in range(6):
                optimizer.zero_grad()
                module(x).square().mean().backward()
                optimizer.step()
        except BaseException as error:
            errors.append(error)

    for module in plain:
        train(module)
    threads = [threading.Thread(target=train, args=(module,)) for module in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(are_equal(state_of(one), state_of(other)) for one, other in zip(models, plain, strict=True))


def test_impossible_fraction_warns_once_with_least() -> None:
    model, x = build("squared relu")
    zoo.lean(model, 0.01)
    model(x).sum().backward()
    clear(model)
    with pytest.warns(BelowFloor) as warned:
        model(x).sum().backward()
    planner = kind_of(model).planner
    least = planner.front[-1].live / planner.plain_bytes
    assert "0.01" in str(warned[0].message)
    assert f"{least:.2f}" in str(warned[0].message)
    assert len(warned) == 1
    clear(model)
    model(x).sum().backward()


@pytest.mark.parametrize("name", NETWORKS)
def test_backward_reads_at_times_of_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    mark = Measurement.read

    def read(self: Measurement, time: int, is_over: bool) -> None:
        found.append(time)
        mark(self, time, is_over)

    monkeypatch.setattr(Measurement, "read", read)
    model, x = build(name)
    zoo.lean(model, "1GB")
    for _ in range(2):
        model(x).square().mean().backward()
        clear(model)
        Measurement.finish()
    assert found
    assert found == sorted(found)
