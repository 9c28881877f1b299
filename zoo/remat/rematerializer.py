"""The dispatch mode that records a forward pass and decides, for each saved tensor, to save it or its recipe."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from zoo.errors import ConfigError
from zoo.remat.budget import INPUT, RECOMPUTED, Budget, Decision
from zoo.remat.fusing import FusedNorms
from zoo.remat.operations import (
    ADD,
    BATCH_NORMS,
    CONCATENATE,
    CONVOLUTION,
    COPIES,
    ENLARGES,
    MASKS,
    RELU,
    RULES,
    Operation,
    Rule,
    apply_line,
    bits_of,
    call_with_keywords,
    first_tensor,
    flops_of,
    line_of_norm,
    mask_of,
    recipe_of_batch_norm,
    repeated_fake_quantization,
    unread_input,
    writes_inside,
    written_arguments,
)
from zoo.remat.recipes import Blank, DeferredHandle, Recipe, SavedHandle, Signs, Store, TrackedTensor, detached, unpack
from zoo.torch_internals import (
    FAKE_QUANTIZE,
    DisableTorchDispatch,
    EagerDispatchMode,
    are_transforms_active,
    before_hooks_are_disabled,
    count_writes,
    is_wrapper,
    may_overlap,
    memory_id,
    saves_its_output,
    storage_id,
    top_saved_tensors_hooks,
)

MAX_DEPTH = 4  # recomputed saved tensors in a chain: bounds the work and the peak memory of one recomputation
TIE_BREAK = 1e-6  # relative difference in price that orders operations of equal price
RELU_NODE = "ReluBackward0"  # autograd's name
NOT_RECOMPUTABLE = "not an operation that can be recomputed"  # a reason to save a tensor
NOT_SMALLER = "the inputs of its recipe are not smaller"  # another
SWEEP = 32  # tensors noted between two searches for those that were freed
# Smaller tensors are saved, as recomputing them costs more time than the memory is worth: smaller than the largest
# output so far by `SMALL_RATIO`, within these limits.
MIN_BYTES, MAX_BYTES, SMALL_RATIO = 2**14, 2**16, 64


class Inputs(NamedTuple):
    """What a recipe needs.

    Args:
    - `through`: intermediates that it recomputes.
    - `starts`: its inputs, which are saved with it.
    - `depth`: length of the longest chain of recomputed saved tensors that it depends on.
    """

    through: list[TrackedTensor]
    starts: list[tuple[TrackedTensor, Tensor]]
    depth: int


class Tie(NamedTuple):
    """A tensor that is saved because the inputs of its recipe are not smaller.

    Args:
    - `value`: the tensor, whose recipe it no longer refers to.
    - `recipe`: that recipe.
    - `version`: the version that the tensor had.
    - `position`: index of the decision.
    """

    value: TrackedTensor
    recipe: Recipe
    version: int
    position: int


class Rematerializer(EagerDispatchMode):
    """A context in which autograd saves recipes in place of tensors where that takes less memory.

    Outputs, gradients, running statistics and random numbers are bit-identical to those without it. Backward may run
    inside or outside the context. The context is reusable, for one forward pass after another, but not reentrant.

    Backward raises RecipeError if an input of a recipe was overwritten since forward.

    Args:
    - `budget`: the limit on recomputing convolutions and matrix products, as `Budget.parse` takes it, but not a limit
      in bytes. A fraction observes the decisions of each forward pass.
    - `depth`: recomputed saved tensors in a chain. A larger depth saves less and has a higher peak in backward.
    - `smallest_bytes`: smaller tensors are saved. None: from 16 to 64 KiB, by the largest output so far.
    - `parameters`: parameters and buffers. They stay alive anyway, and so are free inputs of recipes. An iterator is
      consumed only if that is necessary; every `nn.Parameter` is a free input even without it.
    - `log`: receives all decisions; None to record none.
    - `exact`: False fuses batch norms with their activations (`zoo.remat.fusing`); results are then equal to rounding.
    - `is_hooked`: whether forward hooks may read the outputs of norms; fused norms then always write them.

    While the context is active, ``place`` may be set to the name of the running module; decisions carry it.
    """

    def __init__(
        self,
        budget: Budget | float | int | str | None = None,
        *,
        depth: int = MAX_DEPTH,
        smallest_bytes: int | None = None,
        parameters: Iterable[Tensor] = (),
        log: list[Decision] | None = None,
        exact: bool = True,
        is_hooked: bool = False,
    ) -> None:
        super().__init__()
        self._budget = Budget.parse(budget)
        if self._budget.peak_bytes is not None and self._budget.planned is None:
            raise ConfigError(
                "a limit on the peak memory is met by measuring steps of a module", "Rematerializer", "use zoo.lean"
            )
        self._depth = depth
        self._is_relative = smallest_bytes is None
        self._smallest_bytes = MIN_BYTES if smallest_bytes is None else smallest_bytes
        self._parameters = parameters
        self._log = log
        self._exact, self._is_hooked = exact, is_hooked
        self.place = ""

    def __enter__(self) -> Rematerializer:
        """Start recording."""
        # id of a tensor -> (weak reference to it, its version, its contents)
        self._known: dict[int, tuple[Callable[[], Tensor | None], int, TrackedTensor]] = {}
        self._next_sweep = SWEEP
        # Whether a layer was seen whose weights are frozen, and what it is not decided for yet: handles of tensors that
        # the next operation saves, and of outputs of ReLUs.
        self._is_partly_frozen = False
        self._deferred: list[DeferredHandle] = []
        self._rectified: list[tuple[DeferredHandle, TrackedTensor]] = []
        # contents of which nothing is saved -> the decision
        self._unread: dict[TrackedTensor, Decision] = {}
        # address of the storage of a saved tensor -> its recipe, which is decided again if an input is saved anyway
        self._ties: dict[int, Tie] = {}
        # address of the storage of such an input -> those of the saved tensors
        self._awaiting: dict[int, list[int]] = {}
        # addresses of storages that stay alive until backward
        self._kept: set[int] = set()
        # the storages of parameters and buffers, as far as they were needed
        self._permanent: list[torch.UntypedStorage] = []
        self._has_all_permanent = False
        # address of a storage -> inputs of recipes in it, which autograd's own version check does not cover
        self._started_from: dict[int, set[TrackedTensor]] = {}
        # address of a storage -> the value of the clock at the last write into it
        self._writes: dict[int, int] = {}
        self._clock = 0
        self._producers = Producers() if self._log is not None or self._budget.is_observed else None
        self._has_prices = self._budget.flops_per_byte > 0 or self._producers is not None
        self._num_priced = 0
        if self._producers is not None:
            self._add_all_permanent()
        self._decisions: list[Decision] = []
        self._store = Store()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._fused = None
        if not self._exact:
            self._fused = FusedNorms(self._note_norm, self._keeps_what_is_saved, always_writes=self._is_hooked)
        self._contexts = ExitStack()
        with ExitStack() as contexts:  # unwinds if an interrupt arrives between two entries
            contexts.enter_context(self._hooks)
            contexts.callback(_active.recordings.pop)
            _active.recordings.append(self)
            super().__enter__()
            contexts.push(super().__exit__)
            if self._fused is not None:
                contexts.enter_context(self._fused)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording. What backward needs stays alive."""
        self._settle()
        self._settle_rectified(is_over=True)
        self._contexts.__exit__(*error)
        self._decisions += [each for value, each in self._unread.items() if value.kept is None and value.readers == 0]
        # Some of these refer to self: break the cycles.
        del self._contexts, self._hooks, self._fused, self._known, self._kept, self._started_from, self._producers
        del self._ties, self._awaiting, self._deferred, self._rectified, self._unread, self._permanent
        if self._log is not None:
            self._log += self._decisions
        if self._budget.is_observed and error[0] is None:
            self._budget.observe(self._decisions)
        del self._decisions

    def __torch_dispatch__(
        self, operation: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record how to recompute its outputs."""
        kwargs = kwargs or {}
        if self._fused is not None:
            self._fused.write()
        if self._deferred:
            with count_writes():  # what is saved shares the version counter of the tensor
                self._settle(operation, args)
        if operation is CONVOLUTION and not args[1].requires_grad:
            self._is_partly_frozen = True
        traits = _traits.get(id(operation)) or _traits_of(operation)
        # Transforms of torch.func run operations on wrapped tensors.
        is_recorded = torch.is_grad_enabled() and not are_transforms_active()
        if traits.is_overwriting and is_recorded:
            out = self._record_write(traits, args, kwargs)
        elif traits.is_writing:
            out = self._write(traits, args, kwargs)
        else:
            out = operation(*args, **kwargs)
        if is_recorded:
            price = None
            if traits.record is not None:
                traits.record(self, traits, args, kwargs, out)
            elif self._has_prices:
                price = self._price_of(operation, args, out)
                if price is not None and price <= self._budget.flops_per_byte:
                    self._record(traits, args, kwargs, out)
            if self._producers is not None:
                self._producers.note(operation, args, out, price)
        return out

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which autograd saves the tensors themselves."""
        self._hooks.__exit__()
        try:
            yield
        finally:
            self._hooks.__enter__()

    def _is_large(self, out: Any) -> bool:
        """Return whether an output is strided and large enough to recompute. Others are saved and serve as inputs.

        No output of an operation is larger than the first.
        """
        if not isinstance(out, Tensor):
            return len(out) > 0 and self._is_large(out[0])
        if out.layout is not torch.strided:
            return False
        size = out.nbytes
        if self._is_relative and size > SMALL_RATIO * self._smallest_bytes:
            self._smallest_bytes = min(size // SMALL_RATIO, MAX_BYTES)
            self._is_relative = self._smallest_bytes < MAX_BYTES
        return size >= self._smallest_bytes

    def _price_of(self, operation: Operation, args: tuple[Any, ...], out: Any) -> float | None:
        """Return FLOP per byte of output for a convolution or a matrix product, else None.

        Among equals the earlier one costs slightly less, so that a limit may lie between them.
        """
        flops = flops_of(operation, args, out)
        if flops is None:
            return None
        self._num_priced += 1
        return float(flops / first_tensor(out).nbytes * (1 - TIE_BREAK + TIE_BREAK**2 * self._num_priced))

    def _record(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation that writes into none of its arguments."""
        rule = traits.rule
        is_worthwhile = self._is_large(out) or (  # a small view may hold large memory
            rule.is_view and (id(args[0]) in self._known or self._is_large(args[0]))
        )
        if not is_worthwhile:
            return
        if _has_tensors(kwargs):
            rule, args, kwargs = _without_keywords(rule, args, kwargs)
        values = self._values_of(args)
        if values is None:
            return
        if rule.repeat in COPIES and out.stride() == args[0].stride() and out.dtype == args[0].dtype:
            if values[0].recipe is not None:
                self._known[id(out)] = weakref.ref(out), out._version, values[0]
            return  # a saved tensor is copied because one of the two will be overwritten
        recipe = _recipe_of(rule, values, kwargs, args)
        if rule.repeat in ENLARGES:
            recipe.parts = _smaller_inputs(args, out)
        if isinstance(out, Tensor):
            self._note(out, recipe, 0, out._version)
        else:
            notes = [
                self._note(each, recipe, index, each._version)
                for index, each in enumerate(out)
                if isinstance(each, Tensor)  # others are sizes
            ]
            recipe.outputs = [weakref.ref(value) for value in notes]

    def _record_write(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that overwrites its first argument, and record how to recompute the result."""
        target = args[0]
        recipe = None
        before = self._find(target)
        if (
            before is not None
            and before.recipe is not None  # the inputs of a saved tensor may be gone
            and self._is_large(target)
            and not may_overlap(target)  # one element at several indices would be written several times
            and not _has_tensors(kwargs)
        ):
            # Look up all arguments before the write, as another one may share the memory.
            values = self._values_of(args)
            recipe = None if values is None else _recipe_of(traits.rule, values, kwargs, args)
        out = self._write(traits, args, kwargs)
        if recipe is None:
            self._known.pop(id(target), None)
        else:
            self._note(out, recipe, 0, out._version + 1)  # torch increments the version after this returns
        return out

    def _write(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes into tensors, and record which memory it writes, whichever alias they are."""
        addresses = traits.written_memory(args, kwargs)
        for address in addresses:
            self._copy_before_it_is_overwritten(address)
        if traits.writes_inside:
            with count_writes():
                out = traits.operation(*args, **kwargs)
        else:
            out = traits.operation(*args, **kwargs)
        self._clock += 1
        for address in addresses:
            self._writes[address] = self._clock
        return out

    def _record_batch_norm(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        if not self._is_large(outputs[0]) or type(outputs[0]) is not Tensor:
            return
        repeat, arguments, own = recipe_of_batch_norm(traits.operation, args, outputs)
        values = self._values_of(arguments)
        if values is not None:
            self._note(outputs[0], Recipe(repeat, (*values, *own), {}, is_view=False), 0, outputs[0]._version)

    def _record_fake_quantization(
        self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        with DisableTorchDispatch():
            repeated = repeated_fake_quantization(args)
        if repeated is not None:
            operation, args = repeated
            self._record(traits._replace(rule=Rule(operation, is_view=False, overwrites=False)), args, kwargs, outputs)

    def _note_norm(self, out: Tensor, operation: Operation, args: tuple[Any, ...]) -> None:
        values = self._values_of(args[:3])
        if values is None:
            return
        # What is derived from the statistics is new and small: the recipe itself holds it.
        if args[-1] == "identity" and (line := line_of_norm(*args[:-1])) is not None:
            recipe = Recipe(apply_line, (values[0], *line, None, False), {}, is_view=False)
        else:
            recipe = Recipe(operation, (*values, *args[3:]), {}, is_view=False)
        self._note(out, recipe, 0, out._version)
        if self._producers is not None:
            self._producers.note(torch.ops.zoo.norm_act.default, args, out)

    def _keeps_what_is_saved(self) -> bool:
        """Return whether the hooks of this object are the innermost, and not those of a checkpoint, for example."""
        hooks = top_saved_tensors_hooks(False)
        return hooks is not None and hooks[0] == self._pack

    def _record_mask(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record that a dropout mask can be unpacked from its bits, without drawing random numbers."""
        position = MASKS[traits.operation]
        mask = out if position is None else out[position]
        if mask.nbytes >= self._smallest_bytes and mask.numel() > 0:
            with DisableTorchDispatch():
                bits = bits_of(mask)
            recipe = Recipe(mask_of, (self._note(bits, None, 0, 0), mask.shape, mask.dtype), {}, is_view=False)
            recipe.parts = (bits,)  # nothing else refers to them
            self._note(mask, recipe, 0, mask._version + traits.is_writing)

    def _note(self, tensor: Tensor, recipe: Recipe | None, index: int, version: int) -> TrackedTensor:
        if len(self._known) > self._next_sweep:  # forget tensors that were freed, with the parts of their recipes
            self._known = {key: entry for key, entry in self._known.items() if entry[0]() is not None}
            self._next_sweep = len(self._known) + SWEEP
        value = TrackedTensor(recipe, index, tensor, version, self._store, self._clock)
        self._known[id(tensor)] = value.live, version, value
        return value

    def _find(self, tensor: Tensor) -> TrackedTensor | None:
        """Return the current contents of a tensor; None if they were not recorded."""
        known = self._known.get(id(tensor))
        if known is None:
            return None
        live, version, value = known
        if live() is not tensor or version != tensor._version or self._was_written(tensor, value):
            return None
        return value

    def _was_written(self, tensor: Tensor, value: TrackedTensor) -> bool:
        """Return whether a tensor's memory was written since. Not every write increments its version."""
        if not self._writes:
            return False
        return self._writes.get(memory_id(tensor), 0) > value.clock

    def _values_of(self, args: Sequence[Any]) -> list[Any] | None:
        """Return arguments with tracked tensors in place of tensors, also in lists; None if a tensor is not plain."""
        values = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg = self._find(arg) or self._note_external(arg)
                if arg is None:
                    return None
            elif isinstance(arg, (list, tuple)) and arg and (arg[0] is None or isinstance(arg[0], Tensor)):
                arg = self._values_of(arg)
                if arg is None:
                    return None
            values.append(arg)
        return values

    def _note_external(self, tensor: Tensor) -> TrackedTensor | None:
        """Track a tensor that no recorded operation has computed, if it is plain."""
        if not _is_plain(tensor):
            return None
        is_parameter = _is_parameter(tensor)
        limit = MAX_BYTES if self._is_relative and not tensor.requires_grad else self._smallest_bytes
        is_small = tensor.nbytes < limit
        if is_small and not is_parameter:
            copy = _copy(tensor)  # its memory may be freed or reused before backward
            value = TrackedTensor(None, 0, copy, copy._version, self._store, self._clock)
            value.live = lambda: copy
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, value
            return value
        if is_parameter:
            self._add_permanent(tensor)
        elif not tensor.requires_grad:  # it may be a buffer
            self._add_all_permanent()
        value = self._note(tensor, None, 0, tensor._version)
        if is_small:
            value.live = lambda: tensor  # a parameter that may be created for this call alone
        return value

    def _add_permanent(self, tensor: Tensor) -> None:
        """Record that the memory of a tensor stays alive anyway."""
        self._permanent.append(tensor.untyped_storage())
        self._kept.add(memory_id(tensor))

    def _add_all_permanent(self) -> None:
        """Record that the memory of all parameters and buffers stays alive. Walks over the whole network."""
        if not self._has_all_permanent:
            self._has_all_permanent = True
            self._parameters = [each for each in self._parameters if _is_plain(each)]
            for each in self._parameters:
                self._add_permanent(each)

    def _pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds in place of a saved tensor: a `SavedHandle`, or a tensor and its version."""
        if self._is_partly_frozen and _is_plain(tensor) and tensor.requires_grad and self._is_large(tensor):
            value = self._find(tensor) or self._note(tensor, None, 0, tensor._version)
            if value.readers == 0 and value.kept is None:
                self._settle_rectified()
                if not saves_its_output(tensor):
                    self._deferred.append(DeferredHandle(tensor))
                    return self._deferred[-1]
                node: Any = tensor.grad_fn
                if node.name() == RELU_NODE:
                    return self._pack_rectified(value, tensor)
        return self._pack_now(tensor)

    def _pack_rectified(self, value: TrackedTensor, tensor: Tensor) -> Any:
        """Return what a ReLU holds in place of its output, of which it needs only the signs."""
        reason = self._reason_to_keep(value, tensor)
        if reason is None:
            self._decide(tensor, RECOMPUTED)
            return SavedHandle(value)
        self._note_unread(value, tensor, "backward reads only its signs")
        with DisableTorchDispatch(), torch.no_grad():
            handle = DeferredHandle(detached(tensor))  # the output itself is freed once nothing else can save it
        self._rectified.append((handle, value))
        return handle

    def _settle_rectified(self, is_over: bool = False) -> None:
        """Decide on the outputs of ReLUs that no other operation can save any more, or that one has saved."""
        undecided = []
        for handle, value in self._rectified:
            tensor = handle.tensor
            if tensor is None or tensor._version != handle.version or self._was_written(tensor, value):
                continue  # backward raises an error
            if value.kept is not None or value.readers > 0:
                handle.settle(SavedHandle(value))
            elif is_over or value.live() is None:
                signs = Signs(tensor)
                handle.settle(signs)
                self._decide(signs.bits, INPUT, is_kept=True)
            else:
                undecided.append((handle, value))
        self._rectified = undecided

    def _settle(self, operation: Operation = None, args: tuple[Any, ...] = ()) -> None:
        """Decide on the tensors that the operation which comes next has saved."""
        deferred, self._deferred = self._deferred, []
        unread = None
        if operation is not None and torch.is_grad_enabled() and self._keeps_what_is_saved():
            unread = unread_input(operation, args)
        # If there are several handles of this input, the earlier ones are those of other operations.
        last = max((index for index, handle in enumerate(deferred) if handle.tensor is unread), default=None)
        for index, handle in enumerate(deferred):
            tensor = handle.tensor
            assert tensor is not None, "a handle is settled once"
            if index == last:
                value = self._find(tensor)
                if value is not None:
                    self._note_unread(value, tensor, "backward reads only its shape")
                handle.settle(Blank(tensor))
            else:
                handle.settle(self._pack_now(tensor))

    def _note_unread(self, value: TrackedTensor, tensor: Tensor, reason: str) -> None:
        if self._producers is not None:
            made_by, flops_per_byte = self._producers.of(tensor)
            new_bytes = tensor.untyped_storage().nbytes()
            decision = Decision(made_by, new_bytes, False, reason, flops_per_byte, self.place)
            self._unread.setdefault(value, decision)

    def _pack_now(self, tensor: Tensor) -> Any:
        """Return what autograd holds in place of a tensor, of which backward reads the elements."""
        if self._producers is None:  # the most frequent cases, which the rest would decide in the same way
            if type(tensor) is Parameter:
                return tensor, tensor._version
            if type(tensor) is Tensor and id(tensor) not in self._known and not self._is_large(tensor):
                return detached(tensor), tensor._version
        value = self._find(tensor)
        if value is None:
            if not _is_plain(tensor):
                return tensor if tensor.is_leaf else tensor.detach(), tensor._version
            if tensor.is_leaf:
                self._decide(tensor, NOT_RECOMPUTABLE, is_kept=True)
                return tensor, tensor._version
            value = self._note(tensor, None, 0, tensor._version)
        if value.readers == 0 and value.kept is None:
            reason = self._reason_to_keep(value, tensor)
            if reason is None:
                self._decide(tensor, RECOMPUTED)
            else:
                self._decide(tensor, reason, is_kept=True)
                tie = self._tie_of(value, tensor) if reason is NOT_SMALLER else None
                value.keep(tensor)
                if tie is not None:
                    self._ties[memory_id(tensor)] = tie
                value.is_copied = tensor.nbytes < self._smallest_bytes and not _is_parameter(tensor)
                if value.recipes > 0:  # it was an intermediate of theirs and is an input now
                    self._start_from(value, tensor)
        is_final = value.kept is not None and memory_id(tensor) not in self._ties
        return (value.kept, value.version) if is_final else SavedHandle(value)

    def _decide(self, tensor: Tensor, reason: str, is_kept: bool = False) -> None:
        """Record the decision to save the memory of a tensor, or not to."""
        if self._producers is not None:
            made_by, flops_per_byte = self._producers.of(tensor)
            new_bytes = 0 if memory_id(tensor) in self._kept else tensor.untyped_storage().nbytes()
            self._decisions.append(Decision(made_by, new_bytes, is_kept, reason, flops_per_byte, self.place))
        if is_kept:
            address = memory_id(tensor)
            self._kept.add(address)
            self._ties.pop(address, None)  # its memory is saved for another reason too
            for tied in self._awaiting.pop(address, ()):
                self._decide_again(tied)

    def _tie_of(self, value: TrackedTensor, tensor: Tensor) -> Tie:
        """Return what is needed to decide again once one of the inputs of a recipe is saved anyway."""
        assert value.recipe is not None, "a tensor without a recipe is saved for another reason"
        value.recipe.parts = ()
        pending, seen = [value.recipe], set()
        while pending:
            for source in pending.pop().sources():
                if source in seen or source.kept is not None or source.readers > 0:
                    continue
                seen.add(source)
                if source.recipe is not None:
                    pending.append(source.recipe)
                elif (start := source.live()) is not None:
                    address = memory_id(start)
                    self._awaiting.setdefault(address, []).append(memory_id(tensor))
        return Tie(value, value.recipe, value.version, len(self._decisions) - 1)

    def _decide_again(self, address: int) -> None:
        """Save the recipe of a tensor in place of the tensor, if its inputs are smaller now."""
        tie = self._ties.pop(address, None)
        if tie is None or tie.value.kept is None or tie.value.readers == 0:
            return
        value, kept, version = tie.value, tie.value.kept, tie.value.version
        value.kept, value.version, value.recipe = None, tie.version, tie.recipe
        found = self._search(value, kept.untyped_storage().nbytes(), set())
        if isinstance(found, str) or kept._version != version or value in self._started_from.get(address, ()):
            value.kept, value.version, value.recipe = kept, version, None
            if found is NOT_SMALLER:
                self._ties[address] = tie
            return
        self._kept.discard(address)
        value.adopt(found.depth, found.through)
        for source, start in found.starts:
            self._start_from(source, start)
        if self._producers is not None:
            decision = self._decisions[tie.position]
            self._decisions[tie.position] = decision._replace(is_kept=False, reason=RECOMPUTED)

    def _reason_to_keep(self, value: TrackedTensor, tensor: Tensor) -> str | None:
        """Return why the tensor is saved; None if its recipe is, whose inputs then stay alive.

        The recipe is saved if the inputs that only this recipe keeps alive take fewer bytes than the tensor.
        """
        if value.recipe is None:
            return NOT_RECOMPUTABLE
        storage = tensor.untyped_storage()
        own_bytes = storage.nbytes()
        if own_bytes < self._smallest_bytes:
            return "small"
        if storage_id(storage) in self._kept:
            return "shares memory that is saved anyway"
        found = self._search(value, own_bytes, set())
        if isinstance(found, str):
            stops = self._cheapest_starts(value)
            if stops:
                found = self._search(value, own_bytes, stops)
        if isinstance(found, str):
            return found
        value.adopt(found.depth, found.through)
        for source, start in found.starts:
            self._start_from(source, start)
        return None

    def _search(self, value: TrackedTensor, own_bytes: int, stops: set[TrackedTensor]) -> Inputs | str:
        """Return what a recipe needs if its inputs take fewer than ``own_bytes``, and otherwise why it is not saved.

        Intermediates in ``stops`` are inputs.
        """
        assert value.recipe is not None, "only recipes have inputs"
        through: list[TrackedTensor] = []
        starts: list[tuple[TrackedTensor, Tensor]] = []
        costs: dict[int, int] = {}
        seen, pending, depth = {value}, [value.recipe], 0
        while pending:
            for source in pending.pop().sources():
                if source in seen:
                    continue
                seen.add(source)
                if source.kept is None and source.readers > 0:  # its own recipe is saved, so that its inputs are
                    depth = max(depth, source.depth + 1)
                elif source.kept is None and source.recipe is not None and source not in stops:
                    through.append(source)
                    pending.append(source.recipe)
                else:
                    start = source.live() if source.kept is None else source.kept
                    if start is None:
                        return "an input of its recipe was freed"
                    if source.is_external and not source.is_copied:
                        return "an input of its recipe is memory that torch does not own"
                    if start._version != source.version or self._was_written(start, source):
                        return "an input of its recipe was overwritten"
                    starts.append((source, start))
                    if source.is_copied:
                        costs[id(start)] = start.nbytes
                    elif source.kept is None:
                        memory = start.untyped_storage()
                        if storage_id(memory) not in self._kept:
                            costs[storage_id(memory)] = memory.nbytes()
        # Prefer the parts of a concatenation to the whole: they are often parts of the next one too (DenseNet).
        limit = own_bytes if value.recipe.operation is CONCATENATE else own_bytes - 1
        if sum(costs.values()) > limit:
            return NOT_SMALLER
        if depth > self._depth:
            return f"it would be the end of a chain of {depth} recipes"
        return Inputs(through, starts, depth)

    def _cheapest_starts(self, target: TrackedTensor) -> set[TrackedTensor]:
        """Return the intermediates of a recipe that are alive and cost less than what they would be recomputed from."""
        costs: dict[TrackedTensor, float] = {}
        stops: set[TrackedTensor] = set()
        pending = [(target, False)]
        while pending:
            value, has_sources = pending.pop()
            if value in costs:
                continue
            if value.kept is not None or (value.readers > 0 and value is not target):
                costs[value] = 0
            elif value.recipe is None or has_sources:
                through = float("inf") if value.recipe is None else sum(costs[each] for each in value.recipe.sources())
                costs[value] = min(self._cost_of(value), through)
                if costs[value] < through and value.recipe is not None:
                    stops.add(value)
            else:
                pending.append((value, True))
                pending += [(each, False) for each in value.recipe.sources()]
        return stops - {target}

    def _cost_of(self, value: TrackedTensor) -> float:
        """Return the bytes that saving a tensor takes; infinity if it is freed or overwritten."""
        tensor = value.live()
        if tensor is None or tensor._version != value.version or self._was_written(tensor, value):
            return float("inf")
        memory = tensor.untyped_storage()
        return 0 if storage_id(memory) in self._kept else memory.nbytes()

    def _start_from(self, value: TrackedTensor, tensor: Tensor) -> None:
        """Save an input of recipes, or a copy of it that no in-place write can reach."""
        if value.is_copied:
            if value.kept is not None:
                self._release(value.kept)
            tensor = _copy(tensor)
            value.is_copied = False
            value.clock, value.kept = self._clock, None
        if value.kept is None:
            self._decide(tensor, INPUT, is_kept=True)
            value.keep(tensor)
        self._started_from.setdefault(memory_id(tensor), set()).add(value)

    def _copy_before_it_is_overwritten(self, address: int) -> None:
        """Copy the inputs of recipes out of the memory at this address, which the next operation overwrites.

        The write is legal: in plain training nothing would need the old contents.
        """
        for value in self._started_from.pop(address, ()):
            if value.kept is not None:
                self._release(value.kept)
                value.keep(_copy(value.kept))
                value.is_copied = False
                value.clock = self._clock

    def _release(self, tensor: Tensor) -> None:
        """Forget that the memory of a tensor is saved: a copy replaces it, so that its address may be reused."""
        self._add_all_permanent()
        address = memory_id(tensor)
        if all(storage_id(storage) != address for storage in self._permanent):
            self._kept.discard(address)


class Traits(NamedTuple):
    """What a rematerializer needs to know about an operation, looked up once per process.

    Args:
    - `operation`: the operation. It stays alive, so that no other operation gets its id.
    - `rule`: how its outputs are recomputed, if they are.
    - `record`: the method that records its outputs. None if they are recomputed only within a budget, and for an
      operation with `is_overwriting`.
    - `is_overwriting`: whether it has a rule and writes into its first argument.
    - `is_writing`: whether it writes into any tensor.
    - `written`: the positions and names of the arguments that it writes into.
    - `writes_inside`: whether its writes increment version counters inside its kernel, if at all.
    """

    operation: Operation
    rule: Rule
    record: Callable[..., None] | None
    is_overwriting: bool
    is_writing: bool
    written: tuple[tuple[int, str], ...]
    writes_inside: bool

    def written_memory(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Return the addresses of the storages that the operation writes into."""
        addresses = []
        for position, name in self.written:
            arg = args[position] if position < len(args) else kwargs.get(name)
            for each in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(each, Tensor) and each.layout is torch.strided:  # others have no storage
                    addresses.append(memory_id(each))
        return addresses


_traits: dict[int, Traits] = {}  # by the id of the operation, which is hashed faster than the operation


def _traits_of(operation: Operation) -> Traits:
    """Return the traits of an operation, and add them to ``_traits``."""
    record: Callable[..., None] | None = None
    rule = RULES.get(operation)
    if rule is not None:
        record = None if rule.overwrites else Rematerializer._record
    elif operation in MASKS:
        record = Rematerializer._record_mask
    elif operation in BATCH_NORMS:
        record = Rematerializer._record_batch_norm
    elif operation is FAKE_QUANTIZE:
        record = Rematerializer._record_fake_quantization
    rule = rule or Rule(operation, is_view=False, overwrites=False)
    written, inside = written_arguments(operation), writes_inside(operation)
    traits = Traits(operation, rule, record, rule.overwrites, bool(written) or inside, written, inside)
    _traits[id(operation)] = traits
    return traits


class _Active(threading.local):
    """The active rematerializers of a thread, the innermost last."""

    def __init__(self) -> None:
        self.recordings: list[Rematerializer] = []


_active = _Active()


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Return a context without the saved-tensor hooks of the innermost rematerializer, which torch.func refuses."""
    recording = _active.recordings[-1] if _active.recordings else None
    if recording is None or not recording._keeps_what_is_saved():
        yield
    else:
        with recording.suspended():
            yield


before_hooks_are_disabled(_without_hooks)


def _copy(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides, in memory of its own."""
    with DisableTorchDispatch(), torch.no_grad():
        once = tensor  # copy_ refuses to write into expanded dimensions
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                once = once.narrow(dim, 0, 1)
        copy = torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(once).expand(tensor.shape)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided, owns its memory and has a version counter.

    Excludes sparse and nested tensors, wrapper subclasses, and tensors of `torch.inference_mode`.
    """
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter or not _is_wrapper(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
    )


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor wraps other tensors, or is not materialized yet."""
    return is_lazy(tensor) or is_wrapper(tensor)


def _is_parameter(tensor: Tensor) -> bool:
    """Return ``isinstance(tensor, Parameter)``, which takes longer."""
    return type(tensor) is Parameter or (type(tensor) is not Tensor and isinstance(tensor, Parameter))


def _without_keywords(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Rule, tuple[Any, ...], dict[str, Any]]:
    """Return the same call with all tensors among the positional arguments, as recipes need them."""
    names = [name for name, arg in kwargs.items() if isinstance(arg, Tensor)]
    args = (rule.repeat, names, *[kwargs[name] for name in names], *args)
    others = {name: arg for name, arg in kwargs.items() if name not in names}
    return Rule(call_with_keywords, rule.is_view, overwrites=False), args, others


def _has_tensors(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs) and any(isinstance(arg, Tensor) for arg in kwargs.values())


def _smaller_inputs(args: Sequence[Any], out: Tensor) -> list[Tensor]:
    """Return the inputs whose memory is smaller than an output, or that are parts of it."""
    inputs = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    return [each for each in tensors if each.untyped_storage().nbytes() < out.nbytes]


def _recipe_of(rule: Rule, values: Sequence[Any], kwargs: Any, args: Sequence[Any]) -> Recipe:
    """Return the recipe of an operation, fused with the batch norm before it where possible."""
    return _fused_with_norm(rule.repeat, values, kwargs, args) or Recipe(
        rule.repeat, tuple(values), kwargs, rule.is_view
    )


def _fused_with_norm(operation: Operation, values: Sequence[Any], kwargs: Any, args: Sequence[Any]) -> Recipe | None:
    """Return the recipe that fuses an operation with the batch norm before it; None if there is none.

    Both terms of a sum must have the same strides. ``args`` are the tensors of the tracked ``values``.
    """
    if operation is RELU:
        norm = values[0].recipe
        if norm is not None and norm.operation is apply_line and values[0].readers == 0:
            return Recipe(apply_line, (*norm.args[:4], True), {}, is_view=False)
    elif operation is ADD and not kwargs and isinstance(args[1], Tensor):
        a, b = args
        if a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride():
            for value, other in (values, reversed(values)):
                norm = value.recipe
                if norm is not None and norm.operation is apply_line and value.readers == 0:
                    x, alpha, beta, shortcut, is_rectified = norm.args
                    if shortcut is None and not is_rectified:
                        return Recipe(apply_line, (x, alpha, beta, other, False), {}, is_view=False)
    return None


class Producers:
    """The operations that computed the tensors of a forward pass."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], str, float | None]] = {}

    def note(self, operation: Operation, args: tuple[Any, ...], out: Any, price: float | None = None) -> None:
        """Record the outputs of an operation, which costs ``price`` FLOP per byte of output."""
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                maker, price_of_base = str(operation).rpartition(".")[0], price
                rule = RULES.get(operation)
                if rule is not None and rule.is_view:  # costs what its base costs
                    maker, price_of_base = self.of(args[0])
                self._of[id(each)] = weakref.ref(each), maker, price_of_base

    def of(self, tensor: Tensor) -> tuple[str, float | None]:
        """Return the name of the operation, and FLOP per byte of output if it is one with a price."""
        live, maker, price = self._of.get(id(tensor), (None, "", None))
        return (maker, price) if live is not None and live() is tensor else ("", None)
