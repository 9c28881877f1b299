"""Decides for each saved tensor whether autograd holds it or its recipe.

Tested by tests/remat/test_rematerializer.py.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from zoo.remat.cost import PRODUCTS
from zoo.remat.follow import Follower
from zoo.remat.operations import Operation
from zoo.remat.recipes import SavedHandle, SavedTensor, TrackedTensor, detached
from zoo.remat.rules import rule_of
from zoo.remat.tracking import KeptMemory, Tracker, copy_of, is_parameter, is_trackable
from zoo.torch_internals.data import memory_id, storage_id

RECOMPUTED = "recomputed in backward"  # the reason to save a recipe
INPUT = "input of a recipe"  # the reason to save a tensor that autograd itself does not need
NOT_RECOMPUTABLE = "not an operation that can be recomputed"  # a reason to save a tensor
WITH_BUDGET = "recomputed only if the budget allows it"  # another
SMALL = "small"  # another
WITHIN_BUDGET = "the budget has room for it"  # another
LARGER = "the inputs of its recipe are larger"  # another
TOO_LONG = "the tensors recomputed with it are larger than all saved ones"  # another
FREED = "an input of its recipe was freed"  # another
SHARED = "shares memory that is saved anyway"  # another


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


class Decision(NamedTuple):
    """The decision about a tensor that autograd saves, or that is an input of a recipe.

    Args:
    - `made_by`: name of the operation that computed it, such as "aten.convolution"; "" if it existed before forward.
    - `bytes`: size of its memory; 0 if it stays alive anyway, like the memory of a parameter.
    - `plain_bytes`: bytes that plain training holds for it; 0 if another decision has counted its memory.
    - `is_kept`: whether the tensor is saved, rather than its recipe.
    - `reason`: the reason for the decision.
    - `place`: name of the module that was running.
    """

    made_by: str
    bytes: int
    plain_bytes: int
    is_kept: bool
    reason: str
    place: str

    @property
    def lean_bytes(self) -> int:
        """Bytes held in lean training."""
        return self.bytes if self.is_kept else 0


class DecisionLog:
    """The decisions of a forward pass, and the operations that computed its tensors.

    Args:
    - `place`: returns the name of the running module.
    - `kept`: the memory that is saved. The memory of parameters and buffers is not counted.
    - `existing`: other tensors whose memory is not counted.
    """

    def __init__(self, place: Callable[[], str], kept: KeptMemory, existing: Iterable[Tensor]) -> None:
        self.decisions: list[Decision] = []
        self._kept = kept
        self._existing = {memory_id(each) for each in existing if is_trackable(each)}
        self._plain = KeptMemory(tuple)  # the memory that plain training saves, as far as it was counted
        self._place = place
        self._makers: dict[int, tuple[weakref.ref[Tensor], str, bool]] = {}

    def note(self, operation: Operation, args: tuple[Any, ...], out: Any) -> None:
        """Record the outputs of an operation."""
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                maker, is_product = str(operation).rpartition(".")[0], operation in PRODUCTS
                rule = rule_of(operation)
                if rule is not None and rule.is_view:
                    maker, is_product = self._maker_of(args[0])
                self._makers[id(each)] = weakref.ref(each), maker, is_product

    def note_saved_again(self, tensor: Tensor) -> None:
        """Record that autograd saves a tensor about which a decision was made before.

        In plain training it may take memory of its own, as a clone does.
        """
        if plain_bytes := self._count(tensor):
            self.decisions.append(self._decision(tensor, 0, plain_bytes, False, SHARED))

    def decision(self, tensor: Tensor, new_bytes: int, is_kept: bool, reason: str) -> Decision:
        """Return a decision about a tensor, which takes ``new_bytes`` if it is saved."""
        plain_bytes = 0 if reason is INPUT else self._count(tensor)
        return self._decision(tensor, new_bytes, plain_bytes, is_kept, reason)

    def new_bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes that saving a tensor takes, which are 0 if its memory is saved anyway."""
        address = memory_id(tensor)
        return 0 if address in self._kept or address in self._existing else tensor.untyped_storage().nbytes()

    def _count(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's memory, the first time that plain training would save it; otherwise 0."""
        address = memory_id(tensor)
        if address in self._plain or address in self._existing or self._kept.is_permanent(tensor):
            return 0
        self._plain.keep(tensor)
        return tensor.untyped_storage().nbytes()

    def _decision(self, tensor: Tensor, new_bytes: int, plain_bytes: int, is_kept: bool, reason: str) -> Decision:
        made_by, is_product = self._maker_of(tensor)
        if reason in (NOT_RECOMPUTABLE, FREED) and is_product:
            reason = WITH_BUDGET
        return Decision(made_by, new_bytes, plain_bytes, is_kept, reason, self._place())

    def _maker_of(self, tensor: Tensor) -> tuple[str, bool]:
        """Return the name of the operation, and whether it is a convolution or a matrix product."""
        live, maker, is_product = self._makers.get(id(tensor), (None, "", False))
        return (maker, is_product) if live is not None and live() is tensor else ("", False)


class Decider:
    """Decides which tensors are saved, to minimize the bytes held until backward.

    Args:
    - `log`: receives the decisions; None to record none.
    """

    def __init__(self, tracker: Tracker, kept: KeptMemory, log: DecisionLog | None) -> None:
        self._tracker, self._kept, self._log = tracker, kept, log
        # address of a storage -> inputs of recipes in it, which autograd's own version check does not cover
        self._started_from: dict[int, weakref.WeakSet[TrackedTensor]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of a tensor whose elements backward reads.

        It is a `SavedHandle`, a `SavedTensor`, or a tensor and its version.
        """
        if is_parameter(tensor) and tensor.is_leaf:
            if self._log is not None and is_trackable(tensor):
                self.decide(tensor, NOT_RECOMPUTABLE, is_kept=True)
            return tensor, tensor._version  # itself: backward may read its attributes
        if (  # the most frequent case, which the rest would decide in the same way
            self._log is None
            and type(tensor) is Tensor
            and id(tensor) not in self._tracker.known
            and not self._tracker.is_large(tensor)
        ):
            return detached(tensor), tensor._version
        value = self._tracker.find(tensor)
        if value is None:
            if not is_trackable(tensor):
                return tensor if tensor.is_leaf else tensor.detach(), tensor._version
            if tensor.is_leaf:
                self.decide(tensor, NOT_RECOMPUTABLE, is_kept=True)
                if self._tracker.observer is not None:
                    self._tracker.observer.note_pack(self._tracker.note(tensor, None, 0, tensor._version))
                return tensor, tensor._version
            value = self._tracker.note(tensor, None, 0, tensor._version)
        position = 0 if self._tracker.observer is None else self._tracker.observer.note_pack(value)
        saved = value.saved
        if value.readers > 0 or saved is not None:
            if self._log is not None:
                self._log.note_saved_again(tensor)
        else:
            reason = self.reason_to_keep(value, tensor)
            if reason is None:
                self.decide(tensor, RECOMPUTED)
            else:
                self.decide(tensor, reason, is_kept=True)
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

    def decide(self, tensor: Tensor, reason: str, is_kept: bool = False) -> None:
        """Record the decision whether to save the memory of a tensor."""
        if self._log is not None:
            new_bytes = self._log.new_bytes_of(tensor)
            if reason == NOT_RECOMPUTABLE and 0 < new_bytes < self._tracker.smallest_bytes:
                reason = SMALL
            self._log.decisions.append(self._log.decision(tensor, new_bytes, is_kept, reason))
        if is_kept:
            self._kept.keep(tensor)

    def reason_to_keep(self, value: TrackedTensor, tensor: Tensor, other_bytes: int | None = None) -> str | None:
        """Return why the tensor is saved; None if its recipe is saved, which keeps the inputs of the recipe alive.

        Without a plan, the recipe is saved if the inputs that only this recipe keeps alive are not larger than the
        tensor, or than ``other_bytes`` that can be saved in its place, with a plan, too. The chain of tensors that are
        recomputed with it must not be larger than what is saved, as it may exist at once in backward.
        """
        if value.recipe is None:
            return NOT_RECOMPUTABLE
        storage = tensor.untyped_storage()
        own_bytes = storage.nbytes()
        if own_bytes < self._tracker.smallest_bytes:
            return SMALL
        if storage_id(storage) in self._kept:
            return SHARED
        if other_bytes is not None:
            found = self._search(value, other_bytes, self._plan or set())
        elif self._plan is not None:
            if value in self._plan:
                return WITHIN_BUDGET
            found = self._search(value, sys.maxsize, self._plan)
        else:
            found = self._search(value, own_bytes, set())
        if isinstance(found, str):
            return found
        chain_bytes = max((each.chain_bytes for each in found.recomputed), default=0)
        if self._plan is None and chain_bytes > self._kept.bytes:
            return TOO_LONG
        value.chain_bytes = chain_bytes + own_bytes
        self._adopt(value, found)
        return None

    def copy_before_it_is_overwritten(self, address: int) -> None:
        """Copy the inputs of recipes out of the memory at this address, which the next operation overwrites.

        The write is legal: in plain training nothing would need the old contents.
        """
        for value in self._started_from.pop(address, ()):
            saved = value.saved
            if saved is not None:
                saved.tensor = copy_of(saved.tensor)
                saved.version = value.version = saved.tensor._version
                value.is_copied = False
                value.clock = self._tracker.clock

    def _adopt(self, value: TrackedTensor, inputs: Inputs) -> None:
        """Save the recipe of a tensor, and the inputs of the recipe."""
        starts = [self._start_from(source, start) for source, start in inputs.starts]
        value.adopt([*inputs.through, *inputs.recomputed], starts)

    def _search(self, value: TrackedTensor, limit: int, stops: Container[TrackedTensor]) -> Inputs | str:
        """Return what a recipe needs if its inputs take at most ``limit`` bytes, and otherwise why it is not saved.

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
                if kept is None and source.readers > 0:  # its own recipe is saved, so that its inputs are
                    recomputed.append(source)
                elif kept is None and source.recipe is not None and source not in stops:
                    through.append(source)
                    pending.append(source.recipe)
                else:
                    start = source.live() if kept is None else kept
                    if start is None:
                        return FREED
                    if source.is_external and not source.is_copied and not self._kept.is_permanent(start):
                        return "an input of its recipe is memory that torch does not own"
                    if self._tracker.is_modified(start, source):
                        return "an input of its recipe was overwritten"
                    if self._tracker.has_writes(start) and self._kept.is_permanent(start):
                        return "an input of its recipe is overwritten in each forward pass"
                    starts.append((source, start))
                    if source.is_copied:
                        costs[id(start)] = start.nbytes
                    elif kept is None and (self._plan is None or source not in self._plan):
                        memory = start.untyped_storage()
                        if storage_id(memory) not in self._kept:
                            costs[storage_id(memory)] = memory.nbytes()
        if sum(costs.values()) > limit:
            return LARGER
        return Inputs(through, starts, recomputed)

    def _start_from(self, value: TrackedTensor, tensor: Tensor) -> SavedTensor:
        """Save an input of recipes, or a copy of it that no in-place write can reach, as long as the result lives."""
        saved = value.saved
        if value.is_copied:
            tensor = copy_of(tensor)
            value.is_copied, value.clock, saved = False, self._tracker.clock, None
        if saved is None:
            self.decide(tensor, INPUT, is_kept=True)
            saved = value.keep(tensor)
        self._started_from.setdefault(memory_id(tensor), weakref.WeakSet()).add(value)
        return saved
