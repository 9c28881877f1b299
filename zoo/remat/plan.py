"""Plans which memory of a recorded forward pass is saved, and which backward recomputes, when, and for how long.

A plan does not change any bits, so the plan of a network may change between two steps.
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

# Bytes saved for a unit of time, relative to the bytes of plain training and the time of the forward pass.
RATES = tuple(2.0 ** (power / 2) for power in range(-12, 10))
NUM_PARTS = 8  # the rate may change at multiples of 1 / NUM_PARTS of forward
SHARES = tuple(0.95**power for power in range(10, 70))  # limits, as fractions of plain training's bytes
MAX_RECENT = 16  # how many planners are cached
PATIENCE = 3  # blocks saved in a row without a lower peak before a search ends
MIN_GAIN = 1.03  # ratio of live to saved bytes above which saving another block may lower the peak
MAX_WORK = 1.0  # most time of recomputation, in forward passes
# Without a limit on memory: the bytes that each operation in backward has to save, and each tensor that is tracked, in
# units of the smallest tensor; how many more bytes than the least are saved for fewer live ones; and the time that this
# may take.
LEAST_SAVING, LEAST_PER_TENSOR, SLACK, MORE_WORK = 4, 2, 0.05, 0.1
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Operation:
    """An operation that backward can repeat.

    Args:
    - `sources`: indices of the blocks that it reads, in the order of its arguments, without permanent ones.
    - `cost`: its time, in bytes of memory traffic that take as long.
    - `is_in_place`: whether it may overwrite its first source, if that has the size of its output.
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
    - `is_permanent`: whether it belongs to a parameter or buffer, which stays alive anyway.
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
    - `blocks`: in the order in which they were first computed or read.
    - `operations`: in order.
    - `block_of`: the block of each tracked tensor, in the order in which tracking began.
    - `packs`: the block of each tensor that autograd saved, in order.
    - `nodes`: the number of the node of autograd that saved each of them; each has one of its own if this is empty.
    - `device`: where the operations ran.
    - `has_frozen`: whether frozen layers save less than the blocks that they read.
    - `smallest_bytes`: the size of the smallest tensors that are tracked.
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
        """The positions in ``packs`` in the order in which backward reads them: the tensors of the last node first."""
        nodes = self.nodes or range(len(self.packs))
        return sorted(range(len(self.packs)), key=lambda position: -nodes[position])

    @cached_property
    def times(self) -> list[int]:
        """The time at which backward reads each of ``packs``; see `Plan`."""
        found = [0] * len(self.packs)
        for time, position in enumerate(self.order):
            found[position] = time
        return found


@dataclass(frozen=True)
class Plan:
    """What forward saves, and what backward recomputes.

    Backward runs the nodes of autograd in the opposite order of forward. Each reads its tensors in the order in which
    it saved them. A time is an index of this order.

    Args:
    - `saved`: the blocks that forward saves.
    - `saved_bytes`: their bytes.
    - `cost`: the time of recomputation, in bytes of memory traffic that take as long.
    - `kept`: for each time, the recomputed blocks that stay for later reads.
    - `freed`: for each time, the recomputed blocks that are freed after the read.
    - `before`, `during`, `after`: the bytes of saved and recomputed blocks before each read, at most while blocks are
      recomputed for it, and after it.
    """

    saved: frozenset[int]
    saved_bytes: int
    cost: float
    kept: Sequence[frozenset[int]]
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
        self.needed = {each for each in graph.packs if not blocks[each].is_permanent}
        self.plain_bytes = sum(blocks[each].size for each in self.needed)
        self.forward_cost = sum(each.cost for each in graph.operations)
        self.sizes = [each.size for each in blocks]
        self.permanent = bytearray(each.is_permanent for each in blocks)
        self.operations = [each.operation for each in blocks]
        self.costs = [each.cost for each in graph.operations]
        # block -> the blocks from which it is recomputed
        self.sources = [() if each.operation is None else graph.operations[each.operation].sources for each in blocks]
        self.relevant = self._find_relevant()

    @cached_property
    def front(self) -> list[Plan]:
        """The plans of which no other takes as few live bytes in as little time, from the fastest to the smallest."""
        with _without_garbage_collection():
            return [each.plan() for each in self._schedules()]

    def _schedules(self) -> list[_Schedule]:
        """Return the schedules of the front, the fastest first."""
        backwards = [_Backward(self, each) for each in self._choices()]
        best = self._best(each.fastest for each in backwards)
        for choice in list(backwards):
            for backward in self._tightened(choice):
                backwards.append(backward)
                if _cost_within(best, backward.saved_bytes) <= backward.fastest.cost:
                    break
                if backward.fastest.cost < _cost_within(best, backward.fastest.live):
                    best = self._best([*best, backward.fastest])
        costs = {each: each.fastest.cost for each in backwards}  # at least, within the last limit
        for share in SHARES:
            limit = share * self.plain_bytes
            least = min(_cost_within(best, limit), MAX_WORK * self.forward_cost)
            usable = [
                each
                for each in backwards
                if costs[each] < least and each.saved_bytes <= limit < each.fastest.live and each.too_small < limit
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
        """The plan that saves the least, as far as it is worth an operation, with few live bytes.

        It recomputes nothing if this would not save enough bytes for the time that tracking tensors takes.
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
        return min(found, key=lambda each: (max(each.live, most), each.saved_bytes, each.cost)).plan()

    def _best(self, schedules: Iterable[_Schedule]) -> list[_Schedule]:
        """Return the schedules of which no other takes as few live bytes in as little time, the fastest first."""
        best: list[_Schedule] = []
        for each in sorted(schedules, key=lambda each: (each.cost, each.live)):
            if each.cost <= MAX_WORK * self.forward_cost and (not best or each.live < best[-1].live):
                best.append(each)
        return best

    def _tightened(self, backward: _Backward) -> Iterator[_Backward]:
        """Yield backward passes with fewer and fewer live bytes, each of which has one more block saved."""
        least, num_tries = backward.fastest.live, 0
        while num_tries < PATIENCE and backward.fastest.live > MIN_GAIN * backward.saved_bytes:
            block = backward.halving()
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
        """Return the blocks that backward reads and all from which they can be recomputed, in order of forward."""
        found = set(self.needed)
        pending = list(self.needed)
        for block in pending:
            new = [each for each in self.sources[block] if each not in found]
            found.update(new)
            pending += new
        return sorted(found)

    def _choices(self) -> list[frozenset[int]]:
        """Return different sets of blocks to save."""
        scale = self.plain_bytes / max(self.forward_cost, 1)
        whole, mixed = _MinimumCut(self), _MinimumCut(self)
        cuts = [(rate * scale, whole.saved(rate * scale)) for rate in RATES]
        parts = [len(self.graph.operations) * part // NUM_PARTS for part in range(NUM_PARTS - 1, 0, -1)]
        found = {frozenset(self.needed): None, cuts[0][1]: None}
        for (rate, saved), (higher, fewer) in pairwise(cuts):
            # Between two rates: recompute more of the early layers, for which backward has the most memory.
            found |= dict.fromkeys(mixed.saved(rate, part, higher) for part in parts if saved != fewer)
            found[fewer] = None
        return list(found)


def _cost_within(best: Sequence[_Schedule], limit: float) -> float:
    """Return the least time of schedules, the fastest first, whose live bytes are within a limit; inf without any."""
    place = bisect_left(best, -limit, key=lambda each: -each.live)
    return best[place].cost if place < len(best) else math.inf


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
    """Return the planner of a recorded forward pass. Equal passes have the same one, so that they are planned once."""
    for planner in list(_recent):
        if planner.graph == graph:
            return planner
    planner = Planner(graph)
    _recent.append(planner)
    return planner


END = "end"  # the node of all that backward reads


class _MinimumCut:
    """Minimum cuts between the start of forward and what backward reads: the blocks to save.

    No price falls from one cut to the next, so that each continues the flow of the one before.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._operations = planner, planner.graph.operations
        self._room: dict[Any, dict[Any, float]] = {}  # how much more may flow from a node to another
        self._lost: set[Any] = set()  # the nodes from which no more can flow to the end, now and later
        self._prices: dict[int, float] = {}  # of the operations that backward may repeat
        for index in planner.relevant:
            block = planner.graph.blocks[index]
            if block.is_permanent:
                continue
            is_needed = index in planner.needed
            size = math.inf if block.is_overwritten and not is_needed else block.size
            after = END if is_needed else (index, 1)
            if block.operation is not None:
                self._join((index, 0), after, size)
                self._join(block.operation, (index, 0), math.inf)
                self._prices[block.operation] = 0.0
        for each in self._prices:
            for source in self._operations[each].sources:
                if source not in planner.needed:
                    self._join((source, 1), each, math.inf)
        for index in planner.relevant:
            block = planner.graph.blocks[index]
            if block.operation is None and not block.is_permanent and index not in planner.needed:
                self._push((index, 1), math.inf if block.is_overwritten else block.size)

    def _join(self, first: Any, second: Any, room: float) -> None:
        self._room.setdefault(first, {})[second] = room
        self._room.setdefault(second, {}).setdefault(first, 0.0)

    def saved(self, rate: float, until: int | None = None, then: float = 0.0) -> frozenset[int]:
        """Return the blocks to save, so that their bytes and ``rate`` times the time of recomputation are the least.

        From operation ``until`` on, the rate is ``then``.
        """
        return self.saved_for(
            lambda each: (rate if until is None or each < until else then) * self._operations[each].cost
        )

    def saved_for(self, price: Callable[[int], float]) -> frozenset[int]:
        """Return the blocks to save, so that their bytes and the prices of the repeated operations are the least."""
        for each, old in self._prices.items():
            self._prices[each] = price(each)
            self._push(each, self._prices[each] - old)
        blocks, needed, lost = self._planner.graph.blocks, self._planner.needed, self._lost
        return frozenset(
            index
            for index in self._planner.relevant
            if not blocks[index].is_permanent
            and (index in needed or (index, 1) not in lost)
            and (blocks[index].operation is None or (index, 0) in lost)
        )

    def _push(self, start: Any, amount: float) -> None:
        """Let more flow from a node to the end, as far as there is room."""
        while amount > 0 and start not in self._lost:
            before = {start: start}  # node -> the node before it on a path from the start
            pending = [start]
            while pending and END not in before:
                node = pending.pop()
                for other, room in self._room[node].items():
                    if room > 0 and other not in before and other not in self._lost:
                        before[other] = node
                        pending.append(other)
            if END not in before:
                self._lost |= before.keys()
                return
            path = [END]
            while path[-1] != start:
                path.append(before[path[-1]])
            edges = list(pairwise(reversed(path)))
            flow = min(amount, *(self._room[first][second] for first, second in edges))
            for first, second in edges:
                self._room[first][second] -= flow
                self._room[second][first] += flow
            amount -= flow


class _Event(NamedTuple):
    """A read of a recomputed block; see `Plan`."""

    time: int
    kept: Set[int]
    freed: set[int]
    before: int
    during: int
    after: int


class _Schedule(NamedTuple):
    """When backward recomputes blocks, and when it frees them; see `Plan`."""

    saved: frozenset[int]
    saved_bytes: int
    of_saved: Sequence[int]  # the bytes of saved blocks at each time of backward
    events: list[_Event]
    cost: float
    live: int
    alive: list[int]  # the recomputed blocks at the time of the most bytes, in order of forward

    def plan(self) -> Plan:
        """Return the plan."""
        num_reads = len(self.of_saved)
        kept, freed = [NOTHING] * num_reads, [NOTHING] * num_reads
        before, during, after = (list(self.of_saved) for _ in range(3))
        start = 0
        for event in self.events:
            recomputed = event.before - self.of_saved[event.time]
            for time in range(start, event.time) if recomputed else ():
                for each in (before, during, after):
                    each[time] += recomputed
            start, time = event.time + 1, event.time
            kept[time], freed[time] = frozenset(event.kept), frozenset(event.freed)
            before[time], during[time], after[time] = event.before, event.during, event.after
        return Plan(self.saved, self.saved_bytes, self.cost, kept, freed, before, during, after)


class _Backward:
    """Backward passes of a forward pass that has saved these blocks."""

    def __init__(self, planner: Planner, saved: frozenset[int]) -> None:
        self._planner, self.saved = planner, saved
        self.sizes, self.sources = planner.sizes, planner.sources
        self.too_small = -1.0  # the largest limit that was found too small for any schedule
        self._at_hand = bytearray(planner.permanent)
        for each in saved:
            self._at_hand[each] = True
        self.saved_bytes, self.of_saved = self._bytes_of_saved()
        self._times = [time for time, target in enumerate(planner.reads) if not self._at_hand[target]]
        # block -> the times at which it is read, or another one is recomputed from it, if nothing is freed early
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        self._runs: dict[int, list[int]] = {}
        at_hand = bytearray(self._at_hand)
        for time in self._times:
            target = planner.reads[time]
            if not at_hand[target]:
                run = self._runs[time] = self._run(target, at_hand)
                for block in run:
                    at_hand[block] = True
                    for source in self.sources[block]:
                        self._uses[source].append(time)
            self._uses[target].append(time)
        self._ends: dict[int, list[int]] = {}  # time -> the recomputed blocks that are used last
        for block, uses in self._uses.items():
            if not self._at_hand[block]:
                self._ends.setdefault(uses[-1], []).append(block)

    @cached_property
    def fastest(self) -> _Schedule:
        """The schedule that frees each recomputed block after its last use."""
        found = self.schedule(math.inf)
        assert found is not None, "there is no limit"
        return found

    def schedule(self, limit: float, max_cost: float = math.inf) -> _Schedule | None:
        """Return when backward recomputes blocks and frees them; None if it takes more bytes than a limit, or too long.

        Where more bytes than the limit would be live, it frees the block that is used last, and recomputes it again.
        """
        sizes, reads = self.sizes, self._planner.reads
        costs, operations = self._planner.costs, self._planner.operations
        at_hand = bytearray(self._at_hand)
        stored: set[int] = set()
        events: list[_Event] = []
        recomputed, cost, live, alive = 0, 0.0, self.saved_bytes, list[int]()
        for time in self._times:
            target, saved = reads[time], self.of_saved[time]
            if at_hand[target] and time not in self._ends:
                continue
            kept: Set[int] = NOTHING
            before = during = after = saved + recomputed
            if not at_hand[target]:
                run = self._runs[time] if limit == math.inf else self._run(target, at_hand)
                repeated = {operations[block] for block in run}
                cost += sum([costs[each] for each in repeated if each is not None])
                if cost > max_cost:
                    return None
                stays = {block for block in run if self._uses[block][-1] > time}
                need = _Need(self, run, stays)
                if before + need.most > limit:
                    used = {source for block in run for source in self.sources[block]}
                    evictable = self._cheapest_first([*(stored - used), *(stays - {target})], time)
                    while saved + recomputed + need.most > limit:
                        block = next((each for each in evictable if each in stored or need.falls_without(each)), None)
                        if block is None:
                            self.too_small = limit
                            return None
                        evictable.remove(block)
                        if block in stays:
                            stays.discard(block)
                            need.free(block)
                        else:  # after the read before
                            stored.discard(block)
                            at_hand[block] = False
                            recomputed -= sizes[block]
                            last = events[-1]
                            last.freed.add(block)
                            if block != reads[last.time]:  # its node reads that one until it has run
                                events[-1] = last._replace(after=last.after - sizes[block])
                before, during = saved + recomputed, saved + recomputed + need.most
                if during > live:
                    live, alive = during, sorted(stored.union(run))
                recomputed += need.remaining
                after = saved + recomputed
                if target not in stays:
                    recomputed -= sizes[target]
                stored |= stays
                for block in stays:
                    at_hand[block] = True
                kept = stays
            freed = {block for block in self._ends.get(time, ()) if block in stored}
            for block in freed:
                at_hand[block] = False
                recomputed -= sizes[block]
            stored -= freed
            events.append(_Event(time, kept, freed, before, during, after))
        return _Schedule(self.saved, self.saved_bytes, self.of_saved, events, cost, live, alive)

    def overwrites(self, block: int, source: int) -> bool:
        """Return whether a block is computed in the memory of a source that nothing else needs."""
        operation = self._planner.graph.blocks[block].operation
        assert operation is not None, "blocks that cannot be recomputed are saved"
        is_in_place = self._planner.graph.operations[operation].is_in_place
        return is_in_place and self.sources[block][0] == source and self.sizes[source] == self.sizes[block]

    def halving(self) -> int | None:
        """Return the block that halves what is recomputed at the time of the most bytes; None if there is none."""
        alive = self.fastest.alive
        total, before = sum(self.sizes[each] for each in alive), 0
        found: list[tuple[float, int]] = []
        for block in alive:
            size = self.sizes[block]
            if before > 0 and not self._planner.graph.blocks[block].is_overwritten:
                found.append((abs(before - total / 2) + size, block))
            before += size
        return min(found)[1] if found else None

    def _run(self, target: int, at_hand: bytearray) -> list[int]:
        """Return the blocks that are recomputed for one, in order of forward."""
        found, pending = {target}, [target]
        for block in pending:
            for source in self.sources[block]:
                if not at_hand[source] and source not in found:
                    found.add(source)
                    pending.append(source)
        return sorted(found)

    def _cheapest_first(self, blocks: Iterable[int], time: int) -> list[int]:
        """Return blocks, first those whose memory is free for the longest for the time of their recomputation."""
        operations, worth = self._planner.graph.operations, dict[int, float]()
        for block in blocks:
            uses, operation = self._uses[block], self._planner.graph.blocks[block].operation
            assert operation is not None, "blocks that cannot be recomputed are saved"
            next_use = uses[bisect_right(uses, time)]
            worth[block] = (next_use - time) * self.sizes[block] / operations[operation].cost
        return sorted(worth, key=lambda each: (worth[each], each), reverse=True)

    def _bytes_of_saved(self) -> tuple[int, list[int]]:
        """Return the bytes that forward saves, and those that are still saved at each time of backward."""
        ends = [-1] * len(self.sizes)
        for time, block in enumerate(self._planner.reads):
            ends[block] = time
        for block in reversed(self._planner.relevant):
            if not self._at_hand[block]:
                for source in self.sources[block]:
                    ends[source] = max(ends[source], ends[block])
        changes = [0] * (len(self._planner.reads) + 1)
        for block in self.saved:
            changes[0] += self.sizes[block]
            changes[ends[block] + 1] -= self.sizes[block]
        return changes[0], list(accumulate(changes[:-1]))


class _Need:
    """The bytes that the recomputation of a run of blocks takes.

    ``most`` are the bytes at most, and ``remaining`` the bytes of the last block and of the blocks that stay.
    """

    def __init__(self, backward: _Backward, run: Sequence[int], stays: set[int]) -> None:
        self._sizes = backward.sizes
        last_use = {source: place for place, block in enumerate(run) for source in backward.sources[block]}
        changes = [0] * (len(run) + 1)
        self._ends: dict[int, int] = {}  # block -> the place in the run from which on it need not be live
        for place, block in enumerate(run[:-1]):
            end = last_use[block]
            self._ends[block] = end = end if backward.overwrites(run[end], block) else end + 1
            changes[place] += self._sizes[block]
            if block not in stays:
                changes[end] -= self._sizes[block]
        changes[len(run) - 1] += self._sizes[run[-1]]
        *self._live, self.remaining = accumulate(changes)
        self.most = max(self._live)

    def falls_without(self, block: int) -> bool:
        """Return whether fewer bytes are live at the time of the most if a block does not stay."""
        return self._ends[block] <= self._live.index(self.most)

    def free(self, block: int) -> None:
        """Free a block that stays after its last use within the run."""
        size = self._sizes[block]
        for place in range(self._ends[block], len(self._live)):
            self._live[place] -= size
        self.remaining -= size
        self.most = max(self._live)
