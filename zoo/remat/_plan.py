"""Plans which memory of a recorded forward pass is saved, and when backward recomputes and frees the rest.

A plan changes no bits, so the plan of a network may change between two steps.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

# Exchange rates of memory for time, relative to the bytes of plain training and the time of the forward pass.
RATES = tuple(2.0 ** (power / 2) for power in range(-12, 10))
NUM_PARTS = 8  # the rate may change at multiples of 1 / NUM_PARTS of forward
SHARES = tuple(0.95**power for power in range(10, 70))  # limits, as fractions of the bytes of plain training
MAX_RECENT = 16  # cached planners
PATIENCE = 3  # a search ends after so many saved blocks in a row without a lower peak
MIN_GAIN = 1.03  # saving another block may lower the peak if live bytes exceed this multiple of saved bytes
MAX_WORK = 1.0  # limit on the time of recomputation, in forward passes
# Constants of plans without a limit on memory. The first two are in units of the smallest tensor.
LEAST_SAVING = 4  # bytes that each operation in backward must save
LEAST_PER_TENSOR = 2  # bytes that must be saved per tracked tensor
SLACK = 0.05  # more bytes than the least may be saved, by this fraction, for fewer live bytes
MORE_WORK = 0.1  # recomputation may take longer for it, by this fraction of the forward pass
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Operation:
    """An operation that backward can repeat.

    Args:
    - `sources`: indices of the blocks that it reads, in the order of its arguments, without permanent ones.
    - `cost`: its estimated time, in bytes of memory traffic.
    - `is_in_place`: whether it may overwrite its first source if the sizes are equal.
    """

    sources: tuple[int, ...]
    cost: float
    is_in_place: bool


@dataclass
class Block:
    """The contents of a storage between two writes.

    Args:
    - `size`: bytes of the storage.
    - `operation`: index of the operation that computes it; None if it cannot be recomputed.
    - `is_permanent`: whether it stays alive anyway, as a parameter or buffer.
    - `is_overwritten`: whether forward overwrites it later, so that it cannot be saved.
    """

    size: int
    operation: int | None = None
    is_permanent: bool = False
    is_overwritten: bool = False


@dataclass
class Graph:
    """A recorded forward pass.

    Args:
    - `device`: device of the operations.
    - `blocks`: in the order of their first computation or read.
    - `operations`: in order.
    - `block_of`: the block of each tracked tensor, in order of tracking.
    - `packs`: the block of each tensor that autograd saved, in order.
    - `nodes`: the autograd node of each pack, as a number. Empty: one node per pack.
    - `has_frozen`: whether frozen layers save less than the blocks that they read.
    - `smallest_bytes`: minimum size of a tracked tensor.
    """

    device: str = "cpu"
    blocks: list[Block] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    block_of: list[int] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    has_frozen: bool = False
    smallest_bytes: int = 0

    @cached_property
    def order(self) -> list[int]:
        """The positions in ``packs`` in the order of backward's reads: the tensors of the last node first."""
        nodes = self.nodes or range(len(self.packs))
        return sorted(range(len(self.packs)), key=lambda position: -nodes[position])

    @cached_property
    def times(self) -> list[int]:
        """The time of backward's read of each of ``packs``; see `Plan`."""
        found = [0] * len(self.packs)
        for time, position in enumerate(self.order):
            found[position] = time
        return found


@dataclass(frozen=True)
class Plan:
    """Which blocks forward saves, and when backward recomputes and frees the others.

    Backward runs the nodes of autograd in the opposite order of forward. Each node reads its tensors in the order in
    which it saved them. A time is an index into these reads.

    Args:
    - `saved`: the blocks that forward saves.
    - `saved_bytes`: their bytes.
    - `cost`: the estimated time of recomputation, in bytes of memory traffic.
    - `stored`: for each time, the blocks recomputed for the read that are stored for later ones.
    - `freed`: for each time, the stored blocks that are freed after the read.
    - `before`, `during`, `after`: the bytes of saved and recomputed blocks before each read, at their peak during
      recomputation for it, and after it.
    """

    saved: frozenset[int]
    saved_bytes: int
    cost: float
    stored: Sequence[frozenset[int]]
    freed: Sequence[frozenset[int]]
    before: Sequence[int]
    during: Sequence[int]
    after: Sequence[int]

    @property
    def live(self) -> int:
        """The most bytes of saved and recomputed blocks at any time of backward."""
        return max(self.during, default=0)


class Planner:
    """Finds the plans of a recorded forward pass."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        blocks = graph.blocks
        self.reads = [graph.packs[position] for position in graph.order]
        self.needed = {block for block in graph.packs if not blocks[block].is_permanent}
        self.plain_bytes = sum(blocks[block].size for block in self.needed)
        self.forward_cost = sum(operation.cost for operation in graph.operations)
        self.sizes = [block.size for block in blocks]
        self.permanent = bytearray(block.is_permanent for block in blocks)
        self.operations = [block.operation for block in blocks]
        self.costs = [operation.cost for operation in graph.operations]
        # block -> the blocks from which it is recomputed
        self.sources = [() if index is None else graph.operations[index].sources for index in self.operations]
        self.relevant = self._find_relevant()

    @cached_property
    def front(self) -> list[Plan]:
        """The Pareto front of plans in time and live bytes, from the fastest to the smallest."""
        with _without_garbage_collection():
            return [schedule.plan() for schedule in self._schedules()]

    def _schedules(self) -> list[_Schedule]:
        """Return the schedules of the front, the fastest first."""
        backwards = [_Backward(self, saved) for saved in self._choices()]
        best = self._best(backward.fastest for backward in backwards)
        for choice in list(backwards):
            for backward in self._tightened(choice):
                backwards.append(backward)
                if _cost_within(best, backward.saved_bytes) <= backward.fastest.cost:
                    break
                if backward.fastest.cost < _cost_within(best, backward.fastest.live):
                    best = self._best([*best, backward.fastest])
        costs = {backward: backward.fastest.cost for backward in backwards}  # lower bounds within the last limit
        for share in SHARES:
            limit = share * self.plain_bytes
            least = min(_cost_within(best, limit), MAX_WORK * self.forward_cost)
            usable = [
                backward
                for backward in backwards
                if costs[backward] < least
                and backward.saved_bytes <= limit < backward.fastest.live
                and backward.largest_impossible < limit
            ]
            for backward in sorted(usable, key=costs.__getitem__):
                if costs[backward] >= least:
                    break
                schedule = backward.schedule(limit, least)
                costs[backward] = least if schedule is None else schedule.cost
                if schedule is not None:
                    best = self._best([*best, schedule])
                    least = schedule.cost
        return best

    @cached_property
    def least(self) -> Plan:
        """The plan that saves the least and has few live bytes. Each recomputed operation must save enough bytes.

        Recomputes nothing if it would not save enough bytes to be worth the time of tracking tensors.
        """
        unit = self.graph.smallest_bytes
        first = _Backward(self, _MinimumCut(self).saved_for(lambda _: LEAST_SAVING * unit))
        if self.plain_bytes - first.saved_bytes < LEAST_PER_TENSOR * unit * len(self.graph.block_of):
            return _Backward(self, frozenset(self.needed)).fastest.plan()
        backwards = [first, *self._tightened(first)]
        most = (1 + SLACK) * first.saved_bytes
        max_cost = first.fastest.cost + MORE_WORK * self.forward_cost
        found: list[_Schedule] = []
        for backward in backwards:
            if backward.saved_bytes <= most:
                found.append(backward.fastest)
                limit = most
                while limit < backward.fastest.live:
                    schedule = backward.schedule(limit, max_cost)
                    if schedule is not None:
                        found.append(schedule)
                        break
                    limit += SLACK * self.plain_bytes
        return min(found, key=lambda schedule: (max(schedule.live, most), schedule.saved_bytes, schedule.cost)).plan()

    def _best(self, schedules: Iterable[_Schedule]) -> list[_Schedule]:
        """Return the Pareto front of schedules in time and live bytes, the fastest first."""
        best: list[_Schedule] = []
        for schedule in sorted(schedules, key=lambda schedule: (schedule.cost, schedule.live)):
            if schedule.cost <= MAX_WORK * self.forward_cost and (not best or schedule.live < best[-1].live):
                best.append(schedule)
        return best

    def _tightened(self, backward: _Backward) -> Iterator[_Backward]:
        """Yield backward passes with fewer and fewer live bytes. Each saves one more block than the one before."""
        least, num_tries = backward.fastest.live, 0
        while num_tries < PATIENCE and backward.fastest.live > MIN_GAIN * backward.saved_bytes:
            block = backward.halving_block()
            if block is None:
                return
            backward = _Backward(self, backward.saved | {block})
            yield backward
            num_tries = 0 if backward.fastest.live < least else num_tries + 1
            least = min(least, backward.fastest.live)

    def within(self, limit: float) -> Plan | None:
        """Return the plan with the least time whose live bytes are within a limit; None if there is none."""
        return next((plan for plan in self.front if plan.live <= limit), None)

    def _find_relevant(self) -> list[int]:
        """Return the blocks that backward reads and the blocks that these are computed from, in order of forward."""
        found = set(self.needed)
        pending = list(self.needed)
        for block in pending:
            new = [source for source in self.sources[block] if source not in found]
            found.update(new)
            pending += new
        return sorted(found)

    def _choices(self) -> list[frozenset[int]]:
        """Return candidate sets of blocks to save."""
        scale = self.plain_bytes / max(self.forward_cost, 1)
        whole, mixed = _MinimumCut(self), _MinimumCut(self)
        cuts = [(rate * scale, whole.saved(rate * scale)) for rate in RATES]
        parts = [len(self.graph.operations) * part // NUM_PARTS for part in range(NUM_PARTS - 1, 0, -1)]
        found = {frozenset(self.needed): None, cuts[0][1]: None}
        for (rate, saved), (higher, fewer) in pairwise(cuts):
            # Between two rates: recompute more of the early layers, as backward has the most free memory for them.
            found |= dict.fromkeys(mixed.saved(rate, part, higher) for part in parts if saved != fewer)
            found[fewer] = None
        return list(found)


def _cost_within(best: Sequence[_Schedule], limit: float) -> float:
    """Return the least time of a front of schedules within a limit on live bytes; infinity if none is within it."""
    index = bisect_left(best, -limit, key=lambda schedule: -schedule.live)
    return best[index].cost if index < len(best) else math.inf


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector, which would take half of the time of planning."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


_recent: deque[Planner] = deque(maxlen=MAX_RECENT)


def planner_of(graph: Graph) -> Planner:
    """Return the planner of a recorded forward pass. Equal passes share a planner and are planned once."""
    for planner in list(_recent):
        if planner.graph == graph:
            return planner
    planner = Planner(graph)
    _recent.append(planner)
    return planner


SINK = "sink"  # the node of all blocks that backward reads


class _MinimumCut:
    """Minimum cuts between the start of forward and the reads of backward: the blocks to save.

    The network has two nodes per block, and a node per operation that backward may repeat. The capacity of a block is
    its size. Costs of operations must not decrease from one cut to the next, so that each cut continues the flow of the
    cut before.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._operations = planner, planner.graph.operations
        self._residual: dict[Any, dict[Any, float]] = {}  # residual capacities
        self._saturated: set[Any] = set()  # nodes from which no more can flow to the sink, in this and later cuts
        self._costs: dict[int, float] = {}  # flow into the operations that backward may repeat
        for index in planner.relevant:
            block = planner.graph.blocks[index]
            if block.is_permanent:
                continue
            is_needed = index in planner.needed
            size = math.inf if block.is_overwritten and not is_needed else block.size
            after = SINK if is_needed else (index, 1)
            if block.operation is not None:
                self._connect((index, 0), after, size)
                self._connect(block.operation, (index, 0), math.inf)
                self._costs[block.operation] = 0.0
        for operation in self._costs:
            for source in self._operations[operation].sources:
                if source not in planner.needed:
                    self._connect((source, 1), operation, math.inf)
        for index in planner.relevant:
            block = planner.graph.blocks[index]
            if block.operation is None and not block.is_permanent and index not in planner.needed:
                self._augment((index, 1), math.inf if block.is_overwritten else block.size)

    def _connect(self, first: Any, second: Any, capacity: float) -> None:
        self._residual.setdefault(first, {})[second] = capacity
        self._residual.setdefault(second, {}).setdefault(first, 0.0)

    def saved(self, rate: float, until: int | None = None, then: float = 0.0) -> frozenset[int]:
        """Return the blocks to save that minimize their bytes plus ``rate`` times the time of recomputation.

        From operation ``until`` on, the rate is ``then``.
        """
        return self.saved_for(
            lambda index: (rate if until is None or index < until else then) * self._operations[index].cost
        )

    def saved_for(self, cost: Callable[[int], float]) -> frozenset[int]:
        """Return the blocks to save that minimize their bytes plus the costs of repeated operations."""
        for index, old in self._costs.items():
            self._costs[index] = cost(index)
            self._augment(index, self._costs[index] - old)
        blocks, needed, saturated = self._planner.graph.blocks, self._planner.needed, self._saturated
        return frozenset(
            index
            for index in self._planner.relevant
            if not blocks[index].is_permanent
            and (index in needed or (index, 1) not in saturated)
            and (blocks[index].operation is None or (index, 0) in saturated)
        )

    def _augment(self, start: Any, amount: float) -> None:
        """Increase the flow from a node to the sink by an amount, or as far as capacities allow."""
        while amount > 0 and start not in self._saturated:
            before = {start: start}  # node -> the node before it on a path from the start
            pending = [start]
            while pending and SINK not in before:
                node = pending.pop()
                for other, capacity in self._residual[node].items():
                    if capacity > 0 and other not in before and other not in self._saturated:
                        before[other] = node
                        pending.append(other)
            if SINK not in before:
                self._saturated |= before.keys()
                return
            path = [SINK]
            while path[-1] != start:
                path.append(before[path[-1]])
            edges = list(pairwise(reversed(path)))
            flow = min(amount, *(self._residual[first][second] for first, second in edges))
            for first, second in edges:
                self._residual[first][second] -= flow
                self._residual[second][first] += flow
            amount -= flow


class _Event(NamedTuple):
    """A read of a recomputed block; see `Plan`."""

    time: int
    stored: Set[int]
    freed: set[int]
    before: int
    during: int
    after: int


class _Schedule(NamedTuple):
    """When backward recomputes blocks, and when it frees them; see `Plan`."""

    saved: frozenset[int]
    saved_bytes: int
    remaining_bytes: Sequence[int]  # bytes of saved blocks at each time of backward
    events: list[_Event]
    cost: float
    live: int
    alive_at_peak: list[int]  # recomputed blocks at the time of the most bytes, in order of forward

    def plan(self) -> Plan:
        """Return the plan."""
        num_reads = len(self.remaining_bytes)
        stored, freed = [NOTHING] * num_reads, [NOTHING] * num_reads
        before, during, after = (list(self.remaining_bytes) for _ in range(3))
        start = 0
        for event in self.events:
            recomputed = event.before - self.remaining_bytes[event.time]
            for time in range(start, event.time) if recomputed else ():
                for num_bytes in (before, during, after):
                    num_bytes[time] += recomputed
            start, time = event.time + 1, event.time
            stored[time], freed[time] = frozenset(event.stored), frozenset(event.freed)
            before[time], during[time], after[time] = event.before, event.during, event.after
        return Plan(self.saved, self.saved_bytes, self.cost, stored, freed, before, during, after)


class _Backward:
    """Schedules of backward after a forward pass that saved these blocks."""

    def __init__(self, planner: Planner, saved: frozenset[int]) -> None:
        self._planner, self.saved = planner, saved
        self.sizes, self.sources = planner.sizes, planner.sources
        self.largest_impossible = -1.0  # largest limit for which no schedule was found
        self._available = bytearray(planner.permanent)  # by block
        for block in saved:
            self._available[block] = True
        self.saved_bytes, self.remaining_bytes = self._count_saved_bytes()
        self._times = [time for time, target in enumerate(planner.reads) if not self._available[target]]
        # block -> times of its reads, and of recomputations from it, if nothing is freed early
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        self._runs: dict[int, list[int]] = {}  # time -> blocks to recompute, if nothing is freed early
        available = bytearray(self._available)
        for time in self._times:
            target = planner.reads[time]
            if not available[target]:
                run = self._runs[time] = self._run(target, available)
                for block in run:
                    available[block] = True
                    for source in self.sources[block]:
                        self._uses[source].append(time)
            self._uses[target].append(time)
        self._ends: dict[int, list[int]] = {}  # time -> recomputed blocks with their last use
        for block, uses in self._uses.items():
            if not self._available[block]:
                self._ends.setdefault(uses[-1], []).append(block)

    @cached_property
    def fastest(self) -> _Schedule:
        """The schedule that frees each recomputed block after its last use."""
        found = self.schedule(math.inf)
        assert found is not None, "there is no limit"
        return found

    def schedule(self, limit: float, max_cost: float = math.inf) -> _Schedule | None:
        """Return a schedule within a limit on live bytes; None if there is none, or if it costs more than ``max_cost``.

        Where more bytes than the limit would be live, backward frees a stored block and recomputes it later.
        """
        sizes, reads = self.sizes, self._planner.reads
        costs, operations = self._planner.costs, self._planner.operations
        available = bytearray(self._available)
        stored: set[int] = set()
        events: list[_Event] = []
        recomputed, cost, live, alive = 0, 0.0, self.saved_bytes, list[int]()
        for time in self._times:
            target, saved = reads[time], self.remaining_bytes[time]
            if available[target] and time not in self._ends:
                continue
            new: Set[int] = NOTHING
            before = during = after = saved + recomputed
            if not available[target]:
                run = self._runs[time] if limit == math.inf else self._run(target, available)
                repeated = {operations[block] for block in run}
                cost += sum([costs[operation] for operation in repeated if operation is not None])
                if cost > max_cost:
                    return None
                stays = {block for block in run if self._uses[block][-1] > time}
                memory = _RunMemory(self, run, stays)
                if before + memory.peak > limit:
                    used = {source for block in run for source in self.sources[block]}
                    evictable = self._cheapest_first([*(stored - used), *(stays - {target})], time)
                    while saved + recomputed + memory.peak > limit:
                        block = next(
                            (other for other in evictable if other in stored or memory.falls_without(other)), None
                        )
                        if block is None:
                            self.largest_impossible = limit
                            return None
                        evictable.remove(block)
                        if block in stays:
                            stays.discard(block)
                            memory.free(block)
                        else:  # free it after the previous read
                            stored.discard(block)
                            available[block] = False
                            recomputed -= sizes[block]
                            last = events[-1]
                            last.freed.add(block)
                            if block != reads[last.time]:  # the node holds its own block until it has run
                                events[-1] = last._replace(after=last.after - sizes[block])
                before, during = saved + recomputed, saved + recomputed + memory.peak
                if during > live:
                    live, alive = during, sorted(stored.union(run))
                recomputed += memory.remaining
                after = saved + recomputed
                if target not in stays:
                    recomputed -= sizes[target]
                stored |= stays
                for block in stays:
                    available[block] = True
                new = stays
            freed = {block for block in self._ends.get(time, ()) if block in stored}
            for block in freed:
                available[block] = False
                recomputed -= sizes[block]
            stored -= freed
            events.append(_Event(time, new, freed, before, during, after))
        return _Schedule(self.saved, self.saved_bytes, self.remaining_bytes, events, cost, live, alive)

    def overwrites(self, block: int, source: int) -> bool:
        """Return whether a block can be computed in the memory of a source."""
        operation = self._planner.graph.blocks[block].operation
        assert operation is not None, "blocks that cannot be recomputed are saved"
        is_in_place = self._planner.graph.operations[operation].is_in_place
        return is_in_place and self.sources[block][0] == source and self.sizes[source] == self.sizes[block]

    def halving_block(self) -> int | None:
        """Return the block in the middle of those recomputed at the peak; None without such a block."""
        alive = self.fastest.alive_at_peak
        total, before = sum(self.sizes[block] for block in alive), 0
        found: list[tuple[float, int]] = []
        for block in alive:
            size = self.sizes[block]
            if before > 0 and not self._planner.graph.blocks[block].is_overwritten:
                found.append((abs(before - total / 2) + size, block))
            before += size
        return min(found)[1] if found else None

    def _run(self, target: int, available: bytearray) -> list[int]:
        """Return the blocks to recompute for a block, itself included, in order of forward."""
        found, pending = {target}, [target]
        for block in pending:
            for source in self.sources[block]:
                if not available[source] and source not in found:
                    found.add(source)
                    pending.append(source)
        return sorted(found)

    def _cheapest_first(self, blocks: Iterable[int], time: int) -> list[int]:
        """Return blocks in order of eviction: bytes times time until the next use, per cost, largest first."""
        operations, worth = self._planner.graph.operations, dict[int, float]()
        for block in blocks:
            uses, operation = self._uses[block], self._planner.graph.blocks[block].operation
            assert operation is not None, "blocks that cannot be recomputed are saved"
            next_use = uses[bisect_right(uses, time)]
            worth[block] = (next_use - time) * self.sizes[block] / operations[operation].cost
        return sorted(worth, key=lambda block: (worth[block], block), reverse=True)

    def _count_saved_bytes(self) -> tuple[int, list[int]]:
        """Return the bytes that forward saves, and the bytes still saved at each time of backward."""
        ends = [-1] * len(self.sizes)
        for time, block in enumerate(self._planner.reads):
            ends[block] = time
        for block in reversed(self._planner.relevant):
            if not self._available[block]:
                for source in self.sources[block]:
                    ends[source] = max(ends[source], ends[block])
        changes = [0] * (len(self._planner.reads) + 1)
        for block in self.saved:
            changes[0] += self.sizes[block]
            changes[ends[block] + 1] -= self.sizes[block]
        return changes[0], list(accumulate(changes[:-1]))


class _RunMemory:
    """The bytes that the recomputation of a run of blocks takes.

    ``peak`` is their maximum, and ``remaining`` the bytes of the last block and of the blocks that stay.
    """

    def __init__(self, backward: _Backward, run: Sequence[int], stays: set[int]) -> None:
        self._sizes = backward.sizes
        last_use = {source: index for index, block in enumerate(run) for source in backward.sources[block]}
        changes = [0] * (len(run) + 1)
        self._ends: dict[int, int] = {}  # block -> index in the run after its last use
        for index, block in enumerate(run[:-1]):
            end = last_use[block]
            self._ends[block] = end = end if backward.overwrites(run[end], block) else end + 1
            changes[index] += self._sizes[block]
            if block not in stays:
                changes[end] -= self._sizes[block]
        changes[len(run) - 1] += self._sizes[run[-1]]
        *self._live, self.remaining = accumulate(changes)
        self.peak = max(self._live)

    def falls_without(self, block: int) -> bool:
        """Return whether the peak is lower if a block does not stay."""
        return self._ends[block] <= self._live.index(self.peak)

    def free(self, block: int) -> None:
        """Free a block that stays after its last use within the run."""
        size = self._sizes[block]
        for index in range(self._ends[block], len(self._live)):
            self._live[index] -= size
        self.remaining -= size
        self.peak = max(self._live)
