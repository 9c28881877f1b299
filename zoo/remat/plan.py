"""Plans which memory of a recorded forward pass is saved, and which backward recomputes, when, and for how long.

A plan does not change any bits, so the plan of a network may change between two steps.

Tested by tests/remat/test_plan.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

# Bytes saved for a unit of time, relative to the bytes of plain training and the time of the forward pass.
RATES = tuple(2.0 ** (power / 2) for power in range(-6, 9))
# The rate may change within forward, at the end of one of so many parts; fewer if there are many operations.
MAX_PARTS, NUM_OPERATIONS = 8, 1200
PATIENCE = 4  # how many more blocks to save without a lower peak before giving up
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8)
MAX_WORK = 1.0  # of the time of a forward pass
# Without a limit on memory: the bytes that one more operation in backward has to save, in units of the smallest
# tensor; how many more bytes than the least are saved for fewer live ones; and the time that this may take.
LEAST_SAVING, SLACK, MORE_WORK = 2, 0.05, 0.1


@dataclass(frozen=True)
class Operation:
    """An operation that backward can repeat.

    Args:
    - `sources`: indices of the blocks that it reads, without permanent ones.
    - `cost`: its time, in bytes of memory traffic that take as long.
    - `is_in_place`: whether it may overwrite its only source of the size of its output.
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
    - `device`: where the operations ran.
    - `has_frozen`: whether frozen layers save less than the blocks that they read.
    - `smallest_bytes`: the size of the smallest tensors that are tracked.
    """

    device: str = "cpu"
    blocks: list[Block] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    block_of: list[int] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    has_frozen: bool = False
    smallest_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What forward saves, and what backward recomputes.

    Backward reads the tensors that autograd saved in the opposite order of forward. A time is an index of this order.

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
        self._blocks = graph.blocks
        self._reads = graph.packs[::-1]
        self._needed = {each for each in graph.packs if not graph.blocks[each].is_permanent}
        self.plain_bytes = sum(graph.blocks[each].size for each in self._needed)
        self.forward_cost = sum(each.cost for each in graph.operations)
        self._relevant = self._find_relevant()

    @cached_property
    def front(self) -> list[Plan]:
        """The plans of which no other takes as few live bytes in as little time, from the fastest to the smallest."""
        backwards = [each for saved in self._choices() for each in self._tightened(saved)]
        plans = {each: each.fastest for each in backwards}
        best = self._best(plans.values())
        for backward, plan in plans.items():
            if plan in best:
                limits = (share * self.plain_bytes for share in SHARES)
                best += [backward.plan(each) for each in limits if backward.saved_bytes < each < plan.live]
        return self._best(best)

    @cached_property
    def least(self) -> Plan:
        """The plan that saves the least, as far as it is worth an operation, with few live bytes."""
        if not self._needed:
            return _Backward(self, self._reads, self._relevant, frozenset()).fastest
        cut = _MinimumCut(self, self._relevant, self._needed)
        saved = cut.saved_for(lambda _: LEAST_SAVING * self.graph.smallest_bytes)
        backwards = list(self._tightened(saved))
        most = (1 + SLACK) * backwards[0].saved_bytes
        cost = backwards[0].fastest.cost + MORE_WORK * self.forward_cost
        plans = [each for backward in backwards for each in (backward.fastest, backward.plan(most))]
        plans = [each for each in plans if each.saved_bytes <= most and each.cost <= cost]
        return min(plans, key=lambda each: (max(each.live, most), each.saved_bytes, each.cost))

    def _best(self, plans: Iterable[Plan]) -> list[Plan]:
        best: list[Plan] = []
        for plan in sorted(plans, key=lambda each: (each.cost, each.live)):
            if plan.cost <= MAX_WORK * self.forward_cost and (not best or plan.live < best[-1].live):
                best.append(plan)
        return best

    def within(self, limit: float) -> Plan | None:
        """Return the plan with the least time whose live bytes are within a limit; None if there is none."""
        return next((plan for plan in self.front if plan.live <= limit), None)

    def _find_relevant(self) -> list[int]:
        """Return the blocks that backward reads and all from which they can be recomputed, in order of forward."""
        found: set[int] = set()
        pending = list(self._needed)
        while pending:
            block = pending.pop()
            if block not in found:
                found.add(block)
                pending += self.sources(block)
        return sorted(found)

    def sources(self, block: int) -> tuple[int, ...]:
        """Return the blocks from which a block is recomputed."""
        operation = self._blocks[block].operation
        return () if operation is None else self.graph.operations[operation].sources

    def _choices(self) -> Iterator[frozenset[int]]:
        """Yield different sets of blocks to save."""
        yield frozenset(self._needed)
        if not self._needed:
            return
        cut = _MinimumCut(self, self._relevant, self._needed)
        scale = self.plain_bytes / max(self.forward_cost, 1)
        rate_of: dict[frozenset[int], float] = {}
        for rate in RATES:
            rate_of.setdefault(cut.saved(rate * scale), rate * scale)
        yield from rate_of
        # Between two of them: recompute more of the early layers, for which backward has the most memory.
        num_operations = len(self.graph.operations)
        num_parts = max(2, min(MAX_PARTS, NUM_OPERATIONS // max(num_operations, 1)))
        for rate, higher in pairwise(rate_of.values()):
            for part in range(1, num_parts):
                yield cut.saved(rate, num_operations * part // num_parts, higher)

    def _tightened(self, saved: frozenset[int]) -> Iterator[_Backward]:
        """Yield backward passes with less and less live bytes, each of which has one more block saved."""
        least, num_tries = math.inf, 0
        while num_tries < PATIENCE:
            backward = _Backward(self, self._reads, self._relevant, saved)
            live = backward.fastest.live
            yield backward
            num_tries = 0 if live < least else num_tries + 1
            least = min(least, live)
            total, before = sum(self._blocks[each].size for each in backward.alive), 0
            splits: list[tuple[float, int]] = []
            for block in backward.alive:
                size = self._blocks[block].size
                if before > 0 and not self._blocks[block].is_overwritten:
                    splits.append((abs(before - total / 2) + size, block))
                before += size
            if not splits:
                return
            saved |= {min(splits)[1]}


class _MinimumCut:
    """Minimum cuts between the start of forward and what backward reads: the blocks to save."""

    def __init__(self, planner: Planner, relevant: Sequence[int], needed: set[int]) -> None:
        import networkx  # a dependency of torch; here, as it takes time to import

        self._networkx: Any = networkx
        self._relevant, self._operations = relevant, planner.graph.operations
        self._flow = networkx.DiGraph()
        self._repeated: set[int] = set()
        infinite = math.inf
        for index in relevant:
            block = planner.graph.blocks[index]
            if block.is_permanent:
                continue
            can_save = not block.is_overwritten or index in needed
            self._flow.add_edge((index, 0), (index, 1), capacity=block.size if can_save else infinite)
            if index in needed:
                self._flow.add_edge((index, 1), "end", capacity=infinite)
            if block.operation is None:
                self._flow.add_edge("start", (index, 0), capacity=infinite)
                continue
            self._repeated.add(block.operation)
            self._flow.add_edge("start", block.operation)
            self._flow.add_edge(block.operation, (index, 0), capacity=infinite)
            for source in self._operations[block.operation].sources:
                self._flow.add_edge((source, 1), block.operation, capacity=infinite)

    def saved(self, rate: float, until: int | None = None, then: float = 0.0) -> frozenset[int]:
        """Return the blocks to save, so that their bytes and ``rate`` times the time of recomputation are the least.

        From operation ``until`` on, the rate is ``then``.
        """
        return self.saved_for(
            lambda each: (rate if until is None or each < until else then) * self._operations[each].cost
        )

    def saved_for(self, price: Callable[[int], float]) -> frozenset[int]:
        """Return the blocks to save, so that their bytes and the prices of the repeated operations are the least."""
        for each in self._repeated:
            self._flow["start"][each]["capacity"] = price(each)
        method = self._networkx.algorithms.flow.boykov_kolmogorov
        _, (_, after) = self._networkx.minimum_cut(self._flow, "start", "end", flow_func=method)
        return frozenset(each for each in self._relevant if (each, 1) in after and (each, 0) not in after)


class _Backward:
    """Backward passes of a forward pass that has saved these blocks.

    ``alive`` are the recomputed blocks at the time of the most bytes of the last plan, in order of forward.
    """

    def __init__(self, planner: Planner, reads: Sequence[int], relevant: Sequence[int], saved: frozenset[int]) -> None:
        self._planner, self._reads, self._relevant, self._saved = planner, reads, relevant, saved
        self._blocks = planner.graph.blocks
        self.saved_bytes, self._of_saved = self._bytes_of_saved()
        self.alive: list[int] = []
        # block -> the times at which it is read, or another one is recomputed from it, if nothing is freed early
        self._uses: dict[int, list[int]] = {}
        self._runs: list[list[int]] = []
        made: set[int] = set()
        for time, target in enumerate(reads):
            self._runs.append(self._run(target, made))
            made.update(self._runs[-1])
            for block in self._runs[-1]:
                for source in planner.sources(block):
                    self._uses.setdefault(source, []).append(time)
            self._uses.setdefault(target, []).append(time)
        self._ends: list[list[int]] = [[] for _ in reads]  # the recomputed blocks that are used last at each time
        for block in made:
            self._ends[self._uses[block][-1]].append(block)

    @cached_property
    def fastest(self) -> Plan:
        """The plan that frees each recomputed block after its last use."""
        return self.plan(math.inf)

    def plan(self, limit: float) -> Plan:
        """Return the plan that frees a recomputed block after its last use, or earlier.

        Where more bytes than the limit would be live, it frees the block that is used last, and recomputes it again.
        """
        sizes = [block.size for block in self._blocks]
        stored: set[int] = set()
        kept: list[frozenset[int]] = []
        freed: list[set[int]] = []
        before, during, after = list[int](), list[int](), list[int]()
        recomputed, cost, worst = 0, 0.0, -1
        for time, target in enumerate(self._reads):
            run = self._runs[time] if limit == math.inf else self._run(target, stored)
            if not run:
                live = self._of_saved[time] + recomputed
                before.append(live)
                during.append(live)
                after.append(live)
                ends = stored.intersection(self._ends[time])
                recomputed -= sum(sizes[each] for each in ends)
                stored -= ends
                kept.append(frozenset())
                freed.append(ends)
                continue
            stays = {block for block in run if self._uses[block][-1] > time}
            most, remaining = self._most(run, stays, target)
            room = limit - self._of_saved[time]
            if recomputed + most > room:
                used = {target, *(source for block in run for source in self._planner.sources(block))}
                for block in self._latest_first((stored - used) | (stays - {target}), time):
                    if recomputed + most <= room:
                        break
                    if block in stays:
                        stays.discard(block)
                        most, remaining = self._most(run, stays, target)
                    else:  # freed after the read before
                        stored.discard(block)
                        recomputed -= sizes[block]
                        freed[-1].add(block)
                        after[-1] -= sizes[block]
            before.append(self._of_saved[time] + recomputed)
            during.append(self._of_saved[time] + recomputed + most)
            if during[-1] > worst:
                worst, self.alive = during[-1], sorted(stored.union(run))
            cost += sum(self._planner.graph.operations[each].cost for each in self._operations_of(run))
            recomputed += remaining
            after.append(self._of_saved[time] + recomputed)
            if target not in stays:
                recomputed -= sizes[target]
            stored |= stays
            ends = stored.intersection(self._ends[time])
            recomputed -= sum(sizes[each] for each in ends)
            stored -= ends
            kept.append(frozenset(stays))
            freed.append(ends)
        return Plan(self._saved, self.saved_bytes, cost, kept, list(map(frozenset, freed)), before, during, after)

    def _is_available(self, block: int, stored: set[int]) -> bool:
        return block in self._saved or block in stored or self._blocks[block].is_permanent

    def _run(self, target: int, stored: set[int]) -> list[int]:
        """Return the blocks that are recomputed for a read, in order."""
        if self._is_available(target, stored):
            return []
        run: dict[int, None] = {}
        pending = [target]
        while pending:
            block = pending[-1]
            if block in run or self._is_available(block, stored):
                pending.pop()
                continue
            missing = [each for each in self._planner.sources(block) if each not in run]
            missing = [each for each in missing if not self._is_available(each, stored)]
            if missing:
                pending += missing
                continue
            pending.pop()
            run[block] = None
        return list(run)

    def _operations_of(self, run: Iterable[int]) -> set[int]:
        found = {self._blocks[block].operation for block in run}
        return {each for each in found if each is not None}

    def _latest_first(self, blocks: Iterable[int], time: int) -> list[int]:
        """Return blocks by their next use, the latest first."""
        later = {each: self._uses[each][bisect_right(self._uses[each], time) :] for each in blocks}
        return sorted(later, key=lambda each: later[each][0] if later[each] else len(self._reads), reverse=True)

    def _most(self, run: Sequence[int], stays: set[int], target: int) -> tuple[int, int]:
        """Return the most bytes that a run takes, and the bytes of the target and of what stays."""
        uses: dict[int, int] = {}
        for block in run:
            for source in self._planner.sources(block):
                uses[source] = uses.get(source, 0) + 1
        most, live, fresh = 0, 0, set(run) - stays - {target}
        for block in run:
            size, index = self._blocks[block].size, self._blocks[block].operation
            assert index is not None, "blocks that cannot be recomputed are saved"
            operation = self._planner.graph.operations[index]
            free = 0
            for source in operation.sources:
                uses[source] -= 1
                if uses[source] == 0 and source in fresh:
                    if operation.is_in_place and self._blocks[source].size == size:
                        live -= size
                    else:
                        free += self._blocks[source].size
            live += size
            most = max(most, live)
            live -= free
        return most, live

    def _bytes_of_saved(self) -> tuple[int, list[int]]:
        """Return the bytes that forward saves, and those that are still saved at each time of backward."""
        ends = {block: time for time, block in enumerate(self._reads)}
        for block in reversed(self._relevant):
            if block not in self._saved and block in ends:
                for source in self._planner.sources(block):
                    ends[source] = max(ends.get(source, -1), ends[block])
        changes = [0] * (len(self._reads) + 1)
        for block in self._saved:
            if block in ends:
                changes[0] += self._blocks[block].size
                changes[ends[block] + 1] -= self._blocks[block].size
        totals, total = [], 0
        for change in changes[:-1]:
            total += change
            totals.append(total)
        return changes[0], totals
