"""Decides for each saved tensor whether autograd holds it or its recipe."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zoo.remat.follow import Follower
from zoo.remat.recipes import SavedHandle, SavedTensor, TrackedTensor, detached
from zoo.remat.tracking import KeptMemory, Tracker, copy_of, is_parameter, is_trackable
from zoo.torch_internals.data import memory_id, storage_id


class Inputs(NamedTuple):
    """The tensors that a recipe needs.

    Args:
    - `through`: intermediates that it recomputes.
    - `starts`: its inputs, which are saved with it.
    - `recomputed`: its inputs whose own recipes are saved.
    """

    through: list[TrackedTensor]
    starts: list[tuple[TrackedTensor, Tensor]]
    recomputed: list[TrackedTensor]


class Decider:
    """Decides which tensors are saved, to minimize the bytes held until backward."""

    def __init__(self, tracker: Tracker, kept: KeptMemory) -> None:
        self._tracker, self._kept = tracker, kept
        # address of a storage -> inputs of recipes in it, which autograd's own version check does not cover
        self._started_from: dict[int, weakref.WeakSet[TrackedTensor]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of a tensor whose elements backward reads.

        It is a `SavedHandle`, a `SavedTensor`, or a tensor and its version.
        """
        if is_parameter(tensor) and tensor.is_leaf:
            return tensor, tensor._version  # itself: backward may read its attributes
        if (  # the most frequent case, which the rest would decide in the same way
            type(tensor) is Tensor and id(tensor) not in self._tracker.known and not self._tracker.is_large(tensor)
        ):
            return detached(tensor), tensor._version
        value = self._tracker.find(tensor)
        if value is None:
            if not is_trackable(tensor):
                return tensor if tensor.is_leaf else tensor.detach(), tensor._version
            if tensor.is_leaf:
                self._kept.keep(tensor)
                if self._tracker.observer is not None:
                    self._tracker.observer.note_pack(self._tracker.note(tensor, None, 0, tensor._version))
                return tensor, tensor._version
            value = self._tracker.note(tensor, None, 0, tensor._version)
        position = 0 if self._tracker.observer is None else self._tracker.observer.note_pack(value)
        saved = value.saved
        if not value.is_recomputed and saved is None and not self.saves_recipe(value, tensor):
            self._kept.keep(tensor)
            saved = value.keep(tensor)
            value.is_copied = tensor.nbytes < self._tracker.smallest_bytes and not is_parameter(tensor)
            if value.recipes > 0:  # it was an intermediate of theirs and is an input now
                self._start_from(value, tensor)
        # A copy of the tensor has the same contents in other memory.
        plan = self._plan
        if plan is not None and (saved is None or plan.watches(position)):
            return SavedHandle(value, plan, position)
        return saved or SavedHandle(value, observer=self._tracker.observer)

    @property
    def _plan(self) -> Follower | None:
        """The follower of a plan; None without a plan, or once the pass has left it."""
        observer = self._tracker.observer
        return observer if isinstance(observer, Follower) and observer.is_following else None

    def saves_recipe(self, value: TrackedTensor, tensor: Tensor, other_bytes: int | None = None) -> bool:
        """Return whether the recipe of a tensor is saved, which keeps the inputs of the recipe alive.

        Without a plan, it is if the inputs that only this recipe keeps alive are not larger than the tensor, or than
        ``other_bytes`` that can be saved in its place, with a plan, too. The saved tensors that are recomputed for it
        must not be larger than what is saved, as they may exist at once in backward.
        """
        storage = tensor.untyped_storage()
        own_bytes = storage.nbytes()
        is_small = own_bytes < self._tracker.smallest_bytes
        if value.recipe is None or is_small or storage_id(storage) in self._kept:
            return False
        if other_bytes is not None:
            found = self._search(value, other_bytes, self._plan or set())
        elif self._plan is None:
            found = self._search(value, own_bytes, set())
        else:
            found = None if value in self._plan else self._search(value, sys.maxsize, self._plan)
        if found is None:
            return False
        if self._plan is None and self._recomputed_bytes(found.recomputed) > self._kept.bytes:
            return False
        value.recomputed_bytes = own_bytes
        self._adopt(value, found)
        return True

    def _recomputed_bytes(self, values: Sequence[TrackedTensor]) -> int:
        """Return the bytes of these tensors and all recomputed for them; fewer if they are more than is saved."""
        total, pending = 0, list(values)
        seen = set(pending)
        for value in pending:
            total += value.recomputed_bytes
            if total > self._kept.bytes:
                break
            new = [each for each in value.through if each not in seen]
            seen.update(new)
            pending += new
        return total

    def copy_before_it_is_overwritten(self, address: int) -> None:
        """Copy the inputs of recipes out of the memory at this address, which the next operation overwrites.

        The write is legal: in plain training nothing would need the old contents.
        """
        for value in self._started_from.pop(address, ()):
            saved = value.saved
            if saved is not None:
                saved.tensor = copy_of(saved.tensor)
                saved.version = value.version = saved.tensor._version
                saved.watch(None)
                value.is_copied = False
                value.clock = self._tracker.clock

    def _adopt(self, value: TrackedTensor, inputs: Inputs) -> None:
        """Save the recipe of a tensor, and the inputs of the recipe."""
        starts = [self._start_from(source, start) for source, start in inputs.starts]
        value.adopt([*inputs.through, *inputs.recomputed], starts)

    def _search(self, value: TrackedTensor, limit: int, stops: Container[TrackedTensor]) -> Inputs | None:
        """Return what a recipe needs; None if its inputs are gone, may change, or take more than ``limit`` bytes.

        Intermediates in ``stops`` are inputs.
        """
        assert value.recipe is not None, "only recipes have inputs"
        through: list[TrackedTensor] = []
        starts: list[tuple[TrackedTensor, Tensor]] = []
        recomputed: list[TrackedTensor] = []
        costs: dict[int, int] = {}
        seen, pending = {value}, [value.recipe]
        while pending:
            for source in pending.pop().sources():
                if source in seen:
                    continue
                seen.add(source)
                kept = source.kept
                if kept is None and source.is_recomputed:  # its own recipe is saved, so that its inputs are
                    recomputed.append(source)
                elif kept is None and source.recipe is not None and source not in stops:
                    through.append(source)
                    pending.append(source.recipe)
                else:
                    start = source.live() if kept is None else kept
                    if start is None:
                        return None
                    if source.is_external and not source.is_copied and not self._kept.is_permanent(start):
                        return None  # other code may overwrite its memory
                    if self._tracker.is_modified(start, source):
                        return None
                    if self._tracker.has_writes(start) and self._kept.is_permanent(start):
                        return None  # each forward pass overwrites it
                    starts.append((source, start))
                    if source.is_copied:
                        costs[id(start)] = start.nbytes
                    elif kept is None and (self._plan is None or source not in self._plan):
                        memory = start.untyped_storage()
                        if storage_id(memory) not in self._kept:
                            costs[storage_id(memory)] = memory.nbytes()
        return None if sum(costs.values()) > limit else Inputs(through, starts, recomputed)

    def _start_from(self, value: TrackedTensor, tensor: Tensor) -> SavedTensor:
        """Save an input of recipes, or a copy of it that no in-place write can reach, as long as the result lives."""
        saved = value.saved
        if value.is_copied:
            tensor = copy_of(tensor)
            value.is_copied, value.clock, saved = False, self._tracker.clock, None
        if saved is None:
            self._kept.keep(tensor)
            saved = value.keep(tensor)
        self._started_from.setdefault(memory_id(tensor), weakref.WeakSet()).add(value)
        return saved
