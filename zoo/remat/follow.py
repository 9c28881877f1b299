"""Follows a plan through a forward pass and its backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from zoo.remat.plan import Graph, Plan
from zoo.remat.recipes import SavedTensor, TrackedTensor, recomputed


class Follower:
    """Observes the tensors that a forward pass tracks, and saves those that a plan saves.

    A pass that tracks other tensors than the recorded one continues without the plan, which changes the bytes that it
    holds and no results.

    Args:
    - `graph`: the recorded pass.
    - `plan`: a plan for it.
    - `on_read`: called with the time of a read and whether it is over; see `Plan`.
    """

    def __init__(self, graph: Graph, plan: Plan, on_read: Callable[[int, bool], None] | None = None) -> None:
        self.plan, self._graph, self._on_read = plan, graph, on_read
        self.is_following = True
        self._num_noted = self._num_packed = 0
        self._alive: list[Tensor] = []  # until the recipes of later tensors hold them
        self._values: dict[int, weakref.ref[TrackedTensor]] = {}

    def note_flops(self, flops: float) -> None:
        """Ignore the cost of an operation."""

    def note_write(self, tensor: Tensor) -> None:
        """Ignore a write: the plan saves nothing that the recorded pass overwrites."""

    def note(self, value: TrackedTensor, tensor: Tensor) -> None:
        """Compare a tensor with the recorded one, and keep it alive if the plan saves it."""
        number = self._num_noted
        self._num_noted += 1
        if self.is_following:
            is_known = number < len(self._graph.block_of)
            index = self._graph.block_of[number] if is_known else 0
            if not is_known or self._graph.blocks[index].size != tensor.untyped_storage().nbytes():
                self.is_following = False
                return
            value.number = number
            if value.recipe is None or not value.recipe.is_view:
                self._values[index] = weakref.ref(value)
                if index in self.plan.saved:
                    self._alive.append(tensor)

    def note_pack(self, value: TrackedTensor) -> int:
        """Return the position of a saved tensor among all saved tensors."""
        self._num_packed += 1
        if self._num_packed > len(self._graph.packs):
            self.is_following = False
        return self._num_packed - 1

    def __contains__(self, value: object) -> bool:
        """Return whether the plan saves a tensor."""
        return isinstance(value, TrackedTensor) and self._block_of(value) in self.plan.saved

    def watches(self, position: int) -> bool:
        """Return whether the read of a saved tensor at a position matters, although the tensor is not recomputed."""
        return self._on_read is not None or bool(self.plan.freed[self._graph.times[position]])

    def end(self) -> bool:
        """Release what no recipe needs; return whether the pass was the recorded one."""
        self._alive.clear()
        is_whole = self._num_noted == len(self._graph.block_of) and self._num_packed == len(self._graph.packs)
        return self.is_following and is_whole

    def read(self, position: int, value: TrackedTensor, saved: SavedTensor | None) -> Tensor:
        """Return the tensor that autograd saved at a position, and free the recomputed tensors used for the last time.

        Backward may read in any order and any number of times: what has been freed is recomputed.
        """
        time = self._graph.times[position]
        if self._on_read is not None:
            self._on_read(time, False)
        tensor = value.available() if saved is None else saved.unpack()
        if tensor is None:
            tensor = recomputed(value, lambda each: self._keeps(each, time))
        for block in self.plan.freed[time]:
            freed = self._values[block]() if block in self._values else None  # a pass may have left the plan before
            if freed is not None:
                freed.store.drop(freed)
        if self._on_read is not None:
            self._on_read(time, True)
        return tensor

    def _keeps(self, value: TrackedTensor, time: int) -> bool:
        """Return whether a tensor that is recomputed for a read stays for later ones."""
        return self._block_of(value) in self.plan.kept[time]

    def _block_of(self, value: TrackedTensor) -> int:
        """Return the block that an operation computed as this tensor; -1 for a view and for an unknown tensor."""
        is_view = value.recipe is not None and value.recipe.is_view
        return -1 if is_view or value.number < 0 else self._graph.block_of[value.number]
