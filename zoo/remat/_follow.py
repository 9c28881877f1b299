"""Follows a plan in a forward pass and its backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from zoo.remat._plan import Graph, Plan
from zoo.remat._recipes import SavedTensor, TrackedTensor, recomputed


class Follower:
    """Observer that saves the tensors of a forward pass that a plan saves.

    A pass that tracks other tensors than the recorded one continues without the plan. It then holds other tensors and
    has the same results.

    Args:
    - `graph`: the recorded pass.
    - `plan`: a plan for it.
    - `on_read`: called before and after each read, with its time and whether it is over; see `Plan`.
    """

    def __init__(self, graph: Graph, plan: Plan, on_read: Callable[[int, bool], None] | None = None) -> None:
        self.plan, self._graph, self._on_read = plan, graph, on_read
        self.is_following = True
        self._num_noted = self._num_packed = 0
        self._alive: list[Tensor] = []  # held until recipes of later tensors hold them
        self._tracked: dict[int, weakref.ref[TrackedTensor]] = {}  # by block

    def note_flops(self, flops: float) -> None:
        """Ignore the cost of an operation."""

    def note_write(self, tensor: Tensor) -> None:
        """Ignore a write: plans save nothing that the recorded pass overwrites."""

    def note(self, tracked: TrackedTensor, tensor: Tensor) -> None:
        """Compare a newly tracked tensor with the recorded one, and hold it if the plan saves it."""
        number = self._num_noted
        self._num_noted += 1
        if self.is_following:
            is_known = number < len(self._graph.block_of)
            index = self._graph.block_of[number] if is_known else 0
            if not is_known or self._graph.blocks[index].size != tensor.untyped_storage().nbytes():
                self.is_following = False
                return
            tracked.number = number
            if tracked.recipe is None or not tracked.recipe.is_view:
                self._tracked[index] = weakref.ref(tracked)
                if index in self.plan.saved:
                    self._alive.append(tensor)

    def note_pack(self, tracked: TrackedTensor) -> int:
        """Return the position of a saved tensor among all saved tensors."""
        self._num_packed += 1
        if self._num_packed > len(self._graph.packs):
            self.is_following = False
        return self._num_packed - 1

    def __contains__(self, tracked: object) -> bool:
        """Return whether the plan saves a tensor."""
        return isinstance(tracked, TrackedTensor) and self._block_of(tracked) in self.plan.saved

    def watches(self, position: int) -> bool:
        """Return whether the read at a position must be observed even if the tensor itself is saved."""
        return self._on_read is not None or bool(self.plan.freed[self._graph.times[position]])

    def end(self) -> bool:
        """Release tensors that no recipe needs; return whether the pass was like the recorded one."""
        self._alive.clear()
        is_whole = self._num_noted == len(self._graph.block_of) and self._num_packed == len(self._graph.packs)
        return self.is_following and is_whole

    def read(self, position: int, tracked: TrackedTensor, saved: SavedTensor | None) -> Tensor:
        """Return the tensor that autograd saved at a position, and free recomputed tensors after their last use.

        Backward may read in any order and any number of times: freed tensors are recomputed.
        """
        time = self._graph.times[position]
        if self._on_read is not None:
            self._on_read(time, False)
        tensor = tracked.available() if saved is None else saved.unpack()
        if tensor is None:
            tensor = recomputed(tracked, lambda other: self._is_stored(other, time))
        for block in self.plan.freed[time]:
            freed = self._tracked[block]() if block in self._tracked else None  # missing after a departure
            if freed is not None:
                freed.store.drop(freed)
        if self._on_read is not None:
            self._on_read(time, True)
        return tensor

    def _is_stored(self, tracked: TrackedTensor, time: int) -> bool:
        """Return whether a tensor recomputed for a read is stored for later ones."""
        return self._block_of(tracked) in self.plan.stored[time]

    def _block_of(self, tracked: TrackedTensor) -> int:
        """Return the block of a tensor; -1 for a view or an unknown tensor."""
        is_view = tracked.recipe is not None and tracked.recipe.is_view
        return -1 if is_view or tracked.number < 0 else self._graph.block_of[tracked.number]
