"""Decides for each saved tensor whether autograd holds it or its recipe."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zoo.remat._follow import Follower
from zoo.remat._recipes import SavedHandle, SavedTensor, TrackedTensor, detached
from zoo.remat._tracking import SavedMemory, Tracker, copy_of, is_parameter, is_trackable
from zoo.torch_internals.data import memory_id, storage_id


class RecipeTensors(NamedTuple):
    """The tensors that a recipe needs.

    Args:
    - `intermediates`: tensors that it recomputes on the way.
    - `inputs`: tensors that are saved with it.
    - `recomputed`: tensors whose own recipes are saved.
    """

    intermediates: list[TrackedTensor]
    inputs: list[tuple[TrackedTensor, Tensor]]
    recomputed: list[TrackedTensor]


class Decider:
    """Chooses between tensors and their recipes, to minimize the bytes held until backward."""

    def __init__(self, tracker: Tracker, saved: SavedMemory) -> None:
        self._tracker, self._saved = tracker, saved
        # address of a storage -> inputs of recipes in it. Autograd's version check does not cover them
        self._recipe_inputs: dict[int, weakref.WeakSet[TrackedTensor]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of a tensor whose elements backward reads.

        It is a `SavedHandle`, a `SavedTensor`, or a tensor and its version.
        """
        if is_parameter(tensor) and tensor.is_leaf:
            return tensor, tensor._version  # not a detached tensor: backward may read attributes of the parameter
        if (  # a shortcut for the most frequent case
            type(tensor) is Tensor and id(tensor) not in self._tracker.known and not self._tracker.is_large(tensor)
        ):
            return detached(tensor), tensor._version
        tracked = self._tracker.find(tensor)
        if tracked is None:
            if not is_trackable(tensor):
                return tensor if tensor.is_leaf else tensor.detach(), tensor._version
            if tensor.is_leaf:
                self._saved.add_saved(tensor)
                if self._tracker.observer is not None:
                    self._tracker.observer.note_pack(self._tracker.note(tensor, None, 0, tensor._version))
                return tensor, tensor._version
            tracked = self._tracker.note(tensor, None, 0, tensor._version)
        position = 0 if self._tracker.observer is None else self._tracker.observer.note_pack(tracked)
        saved = tracked.saved
        if not tracked.is_recomputed and saved is None and not self.save_recipe_if_smaller(tracked, tensor):
            self._saved.add_saved(tensor)
            saved = tracked.save(tensor)
            tracked.is_copied = tensor.nbytes < self._tracker.smallest_bytes and not is_parameter(tensor)
            if tracked.recipes > 0:  # it was an intermediate of recipes and is an input now
                self._save_input(tracked, tensor)
        plan = self._plan
        if plan is not None and (saved is None or plan.watches(position)):
            return SavedHandle(tracked, plan, position)
        # `saved` may be a copy of the tensor in other memory.
        return saved or SavedHandle(tracked, observer=self._tracker.observer)

    @property
    def _plan(self) -> Follower | None:
        """The follower of the plan; None without a plan or after a departure from it."""
        observer = self._tracker.observer
        return observer if isinstance(observer, Follower) and observer.is_following else None

    def save_recipe_if_smaller(self, tracked: TrackedTensor, tensor: Tensor, other_bytes: int | None = None) -> bool:
        """Save the recipe of a tensor, and its inputs, if this takes less memory; return whether it was saved.

        Without a plan, the inputs that only this recipe keeps alive must not be larger than the tensor. The tensors
        recomputed for it may all exist at once in backward, so they must not be larger than all that is saved.

        Args:
        - `other_bytes`: size of what can be saved in place of the tensor, with or without a plan; None: the tensor.
        """
        storage = tensor.untyped_storage()
        own_bytes = storage.nbytes()
        is_small = own_bytes < self._tracker.smallest_bytes
        if tracked.recipe is None or is_small or storage_id(storage) in self._saved:
            return False
        if other_bytes is not None:
            found = self._search(tracked, other_bytes, self._plan or set())
        elif self._plan is None:
            found = self._search(tracked, own_bytes, set())
        else:
            found = None if tracked in self._plan else self._search(tracked, sys.maxsize, self._plan)
        if found is None:
            return False
        if self._plan is None and self._recomputed_bytes(found.recomputed) > self._saved.bytes:
            return False
        tracked.recomputed_bytes = own_bytes
        self._save_recipe(tracked, found)
        return True

    def _recomputed_bytes(self, values: Sequence[TrackedTensor]) -> int:
        """Return the bytes of these tensors and of all recomputed for them. Stops counting above the saved bytes."""
        total, pending = 0, list(values)
        seen = set(pending)
        for tracked in pending:
            total += tracked.recomputed_bytes
            if total > self._saved.bytes:
                break
            new = [intermediate for intermediate in tracked.intermediates if intermediate not in seen]
            seen.update(new)
            pending += new
        return total

    def copy_before_write(self, address: int) -> None:
        """Copy the inputs of recipes at an address before the next operation overwrites it.

        The write is legal: in plain training nothing would need the old contents.
        """
        for tracked in self._recipe_inputs.pop(address, ()):
            saved = tracked.saved
            if saved is not None:
                saved.tensor = copy_of(saved.tensor)
                saved.version = tracked.version = saved.tensor._version
                saved.watch(None)
                tracked.is_copied = False
                tracked.clock = self._tracker.clock

    def _save_recipe(self, tracked: TrackedTensor, needed: RecipeTensors) -> None:
        """Save the recipe of a tensor and its inputs."""
        inputs = [self._save_input(source, tensor) for source, tensor in needed.inputs]
        tracked.save_recipe([*needed.intermediates, *needed.recomputed], inputs)

    def _search(self, tracked: TrackedTensor, limit: int, cut: Container[TrackedTensor]) -> RecipeTensors | None:
        """Return the tensors that a recipe needs, or None.

        None if an input was freed, may be overwritten, or the inputs take more than ``limit`` bytes. Tensors in
        ``cut`` become inputs, not intermediates.
        """
        assert tracked.recipe is not None, "only recipes have inputs"
        intermediates: list[TrackedTensor] = []
        inputs: list[tuple[TrackedTensor, Tensor]] = []
        recomputed: list[TrackedTensor] = []
        num_bytes: dict[int, int] = {}  # by tensor or storage
        seen, pending = {tracked}, [tracked.recipe]
        while pending:
            for source in pending.pop().sources():
                if source in seen:
                    continue
                seen.add(source)
                saved = source.saved_tensor
                if saved is None and source.is_recomputed:  # its recipe and the inputs of the recipe are saved
                    recomputed.append(source)
                elif saved is None and source.recipe is not None and source not in cut:
                    intermediates.append(source)
                    pending.append(source.recipe)
                else:
                    tensor = source.live() if saved is None else saved
                    if tensor is None:
                        return None
                    if source.is_external and not source.is_copied and not self._saved.is_permanent(tensor):
                        return None  # other code may overwrite its memory
                    if self._tracker.is_modified(tensor, source):
                        return None
                    if self._tracker.has_writes(tensor) and self._saved.is_permanent(tensor):
                        return None  # each forward pass overwrites it
                    inputs.append((source, tensor))
                    if source.is_copied:
                        num_bytes[id(tensor)] = tensor.nbytes
                    elif saved is None and (self._plan is None or source not in self._plan):
                        memory = tensor.untyped_storage()
                        if storage_id(memory) not in self._saved:
                            num_bytes[storage_id(memory)] = memory.nbytes()
        return None if sum(num_bytes.values()) > limit else RecipeTensors(intermediates, inputs, recomputed)

    def _save_input(self, tracked: TrackedTensor, tensor: Tensor) -> SavedTensor:
        """Save an input of recipes, or a copy that no in-place write can reach, until the result is freed."""
        saved = tracked.saved
        if tracked.is_copied:
            tensor = copy_of(tensor)
            tracked.is_copied, tracked.clock, saved = False, self._tracker.clock, None
        if saved is None:
            self._saved.add_saved(tensor)
            saved = tracked.save(tensor)
        self._recipe_inputs.setdefault(memory_id(tensor), weakref.WeakSet()).add(tracked)
        return saved
