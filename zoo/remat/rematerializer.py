"""The dispatch mode that records a forward pass and decides, for each saved tensor, to save it or its recipe."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from zoo.remat.budget import INPUT, Budget, Decision
from zoo.remat.fusing import FusedNorms
from zoo.remat.operations import (
    ADD,
    BATCH_NORMS,
    CONCATENATE,
    COPIES,
    MASKS,
    RELU,
    RULES,
    Operation,
    Rule,
    apply_line,
    bits_of,
    flops_of,
    line_of_norm,
    mask_of,
    recipe_of_batch_norm,
    writes_inside,
    written_arguments,
)
from zoo.remat.recipes import Recipe, SavedHandle, Store, TrackedTensor, unmodified
from zoo.torch_internals import (
    DisableTorchDispatch,
    TorchDispatchMode,
    are_transforms_active,
    before_hooks_are_disabled,
    count_writes,
    is_wrapper,
    may_overlap,
    schema_of,
    skip_autograd_and_autocast,
    storage_id,
    top_saved_tensors_hooks,
)

MAX_DEPTH = 4  # recomputed saved tensors in a chain: bounds the work and the peak memory of one recomputation
NOT_RECOMPUTABLE = "not an operation that can be recomputed"  # a reason to save a tensor
MIN_BYTES = 2**16  # smaller tensors are saved: recomputing them costs more time than the memory is worth


class Rematerializer(TorchDispatchMode):
    """A context in which autograd saves recipes in place of tensors where that takes less memory.

    Outputs, gradients, running statistics and random numbers are bit-identical to those without it. Backward may run
    inside or outside the context. The context is reusable, for one forward pass after another, but not reentrant.

    Backward raises RecipeError if an input of a recipe was overwritten since forward.

    Args:
    - `budget`: the limit on recomputing convolutions and matrix products, as `Budget.parse` takes it. A budget in bytes
      observes the decisions of each forward pass.
    - `depth`: recomputed saved tensors in a chain. A larger depth saves less and has a higher peak in backward.
    - `smallest_bytes`: smaller tensors are saved.
    - `parameters`: tensors that stay alive anyway, and so are free inputs of recipes.
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
        smallest_bytes: int = MIN_BYTES,
        parameters: Iterable[Tensor] = (),
        log: list[Decision] | None = None,
        exact: bool = True,
        is_hooked: bool = False,
    ) -> None:
        super().__init__()
        self._budget = budget if isinstance(budget, Budget) else Budget.parse(budget)
        self._depth, self._smallest_bytes = depth, smallest_bytes
        self._parameters = [each.untyped_storage() for each in parameters if _is_plain(each)]
        self._log = log
        self._exact, self._is_hooked = exact, is_hooked
        self.place = ""

    def __enter__(self) -> Rematerializer:
        """Start recording."""
        # id of a tensor -> (weak reference to it, its version, its contents)
        self._known: dict[int, tuple[Callable[[], Tensor | None], int, TrackedTensor]] = {}
        # addresses of storages that stay alive until backward
        self._kept = {storage_id(storage) for storage in self._parameters}
        # address of a storage -> inputs of recipes in it, which autograd's own version check does not cover
        self._started_from: dict[int, set[TrackedTensor]] = {}
        # address of a storage -> the value of the clock at the last write into it
        self._writes: dict[int, int] = {}
        self._clock = 0
        self._producers = Producers() if self._log is not None or self._budget.is_limited else None
        self._decisions: list[Decision] = []
        self._store = Store()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
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
        self._contexts.__exit__(*error)
        # Some of these refer to self: break the cycles.
        del self._contexts, self._hooks, self._fused, self._known, self._kept, self._started_from, self._producers
        if self._log is not None:
            self._log += self._decisions
        if self._budget.is_limited and error[0] is None:
            self._budget.observe(self._decisions)
        del self._decisions

    def __torch_dispatch__(
        self, operation: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record how to recompute its outputs."""
        kwargs = kwargs or {}
        if self._fused is not None:
            self._fused.write()
        # Transforms of torch.func run operations on wrapped tensors.
        is_recorded = torch.is_grad_enabled() and not are_transforms_active()
        rule = RULES.get(operation) if is_recorded else None
        if rule is not None and rule.overwrites:
            return self._record_write(rule, operation, args, kwargs)
        written = _written_tensors(operation, args, kwargs)
        for tensor in written:
            self._copy_before_it_is_overwritten(tensor)
        if writes_inside(operation):
            with count_writes():
                out = operation(*args, **kwargs)
        else:
            out = operation(*args, **kwargs)
        for tensor in written:
            self._note_write(tensor)
        if is_recorded:
            if rule is not None:
                if (rule.is_view or self._is_large(out)) and _are_plain((*args, out)):
                    self._record(rule, args, kwargs, out)
            elif operation in MASKS:
                self._record_mask(operation, out)
            elif operation in BATCH_NORMS:
                if out[0].nbytes >= self._smallest_bytes and _are_plain((*args, out)):
                    self._record_batch_norm(operation, args, out)
            elif self._budget.flops_per_byte > 0 and self._is_cheap(operation, args, out) and _are_plain((*args, out)):
                self._record(Rule(operation, is_view=False, overwrites=False), args, kwargs, out)
            if self._producers is not None:
                self._producers.note(operation, args, out)
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
        """Return whether an output is large enough to recompute. Smaller ones are saved and serve as inputs."""
        has_bytes = isinstance(out, Tensor) and out.layout is torch.strided
        return not has_bytes or out.nbytes >= self._smallest_bytes

    def _is_cheap(self, operation: Operation, args: tuple[Any, ...], out: Any) -> bool:
        flops = flops_of(operation, args, out)
        return flops is not None and flops <= self._budget.flops_per_byte * out.nbytes

    def _record(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if any(isinstance(arg, Tensor) for arg in kwargs.values()):
            return
        values = tuple([self._value_of(arg) for arg in args])
        if rule.repeat in COPIES and out.stride() == args[0].stride() and out.dtype == args[0].dtype:
            if values[0].recipe is not None:
                self._known[id(out)] = weakref.ref(out), out._version, values[0]
            return  # a saved tensor is copied because one of the two will be overwritten
        recipe = _recipe_of(rule, values, kwargs, args)
        if rule.repeat is CONCATENATE:
            recipe.parts = args[0]  # the last part is often unused otherwise, but is an input of the recipe
        if isinstance(out, Tensor):
            self._note(out, recipe, 0, out._version)
        else:
            notes = [self._note(each, recipe, index, each._version) for index, each in enumerate(out)]
            recipe.outputs = [weakref.ref(value) for value in notes]

    def _record_write(self, rule: Rule, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that overwrites its first argument, and record how to recompute the result."""
        target = args[0]
        recipe = None
        before = self._find(target)
        if (
            before is not None
            and before.recipe is not None  # the inputs of a saved tensor may be gone
            and self._is_large(target)
            and _are_plain(args)
            and not may_overlap(target)  # one element at several indices would be written several times
            and not any(isinstance(arg, Tensor) for arg in kwargs.values())
        ):
            # Look up all arguments before the write, as another one may share the memory.
            values = tuple([self._value_of(arg) for arg in args])
            recipe = _recipe_of(rule, values, kwargs, args)
        self._copy_before_it_is_overwritten(target)
        out = operation(*args, **kwargs)
        self._note_write(target)
        if recipe is None:
            self._known.pop(id(target), None)
        else:
            self._note(out, recipe, 0, out._version + 1)  # torch increments the version after this returns
        if self._producers is not None:
            self._producers.note(operation, args, out)
        return out

    def _record_batch_norm(self, operation: Operation, args: tuple[Any, ...], outputs: Any) -> None:
        with skip_autograd_and_autocast(), DisableTorchDispatch():
            repeat, arguments, own = recipe_of_batch_norm(operation, args, outputs)
        recipe = Recipe(repeat, (*map(self._value_of, arguments), *own), {}, is_view=False)
        self._note(outputs[0], recipe, 0, outputs[0]._version)

    def _note_norm(self, out: Tensor, operation: Operation, args: tuple[Any, ...]) -> None:
        x, weight, bias, *rest = args
        # What is derived from the statistics is new and small: the recipe itself holds it.
        if rest[-1] == "identity" and (line := line_of_norm(*args[:-1])) is not None:
            recipe = Recipe(apply_line, (self._value_of(x), *line, None, False), {}, is_view=False)
        else:
            recipe = Recipe(operation, (*map(self._value_of, (x, weight, bias)), *rest), {}, is_view=False)
        self._note(out, recipe, 0, out._version)
        if self._producers is not None:
            self._producers.note(torch.ops.zoo.norm_act.default, args, out)

    def _keeps_what_is_saved(self) -> bool:
        """Return whether the hooks of this object are the innermost, and not those of a checkpoint, for example."""
        hooks = top_saved_tensors_hooks(False)
        return hooks is not None and hooks[0] == self._pack

    def _record_mask(self, operation: Operation, out: Any) -> None:
        """Record that a dropout mask can be unpacked from its bits, without drawing random numbers."""
        position = MASKS[operation]
        mask = out if position is None else out[position]
        if mask.nbytes >= self._smallest_bytes and mask.numel() > 0:
            with DisableTorchDispatch(), torch.no_grad():
                bits = bits_of(mask)
            recipe = Recipe(mask_of, (self._note(bits, None, 0, 0), mask.shape, mask.dtype), {}, is_view=False)
            recipe.parts = (bits,)  # nothing else refers to them
            self._note(mask, recipe, 0, mask._version + schema_of(operation).is_mutable)

    def _note(self, tensor: Tensor, recipe: Recipe | None, index: int, version: int) -> TrackedTensor:
        value = TrackedTensor(recipe, index, tensor, version, self._store, self._clock)
        self._known[id(tensor)] = value.live, version, value
        return value

    def _note_write(self, tensor: Tensor) -> None:
        """Record an in-place write into the memory of a tensor, whichever alias it went through."""
        if _is_plain(tensor):
            self._clock += 1
            self._writes[storage_id(tensor.untyped_storage())] = self._clock

    def _find(self, tensor: Tensor) -> TrackedTensor | None:
        """Return the current contents of a tensor; None if they were not recorded."""
        live, version, value = self._known.get(id(tensor), (None, 0, None))
        if live is None or live() is not tensor or version != tensor._version or self._was_written(tensor, value):
            return None
        return value

    def _was_written(self, tensor: Tensor, value: TrackedTensor | None) -> bool:
        """Return whether a tensor's memory was written since. Not every write increments its version."""
        if not self._writes or value is None:
            return False
        return self._writes.get(storage_id(tensor.untyped_storage()), 0) > value.clock

    def _value_of(self, arg: Any) -> Any:
        """Return the tracked tensor of a tensor, a list of them for a list, and anything else unchanged."""
        if isinstance(arg, Tensor):
            return self._find(arg) or self._note_external(arg)
        if isinstance(arg, (list, tuple)) and any(isinstance(each, Tensor) for each in arg):
            return [self._value_of(each) for each in arg]
        return arg

    def _note_external(self, tensor: Tensor) -> TrackedTensor:
        """Track a tensor that no recorded operation has computed."""
        if tensor.nbytes < self._smallest_bytes and not isinstance(tensor, Parameter):
            copy = _copy(tensor)  # its memory may be freed or reused before backward
            value = TrackedTensor(None, 0, copy, copy._version, self._store, self._clock)
            value.live = lambda: copy
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, value
            return value
        value = self._note(tensor, None, 0, tensor._version)
        value.is_external = _is_external(tensor)
        if tensor.nbytes < self._smallest_bytes:
            value.live = lambda: tensor  # a parameter that may be created for this call alone
        return value

    def _pack(self, tensor: Tensor) -> Any:
        """Return what autograd holds in place of a saved tensor."""
        if not _is_plain(tensor):
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        value = self._find(tensor)
        if value is None:
            if tensor.is_leaf:
                self._decide(tensor, NOT_RECOMPUTABLE, is_kept=True)
                return tensor, tensor._version
            value = self._note(tensor, None, 0, tensor._version)
        if value.readers == 0 and value.kept is None:
            reason = self._reason_to_keep(value, tensor)
            if reason is None:
                self._decide(tensor, "recomputed in backward")
            else:
                self._decide(tensor, reason, is_kept=True)
                value.keep(tensor)
                value.is_copied = tensor.nbytes < self._smallest_bytes and not isinstance(tensor, Parameter)
                value.is_external = _is_external(tensor)
                if value.recipes > 0:  # it was an intermediate of theirs and is an input now
                    self._start_from(value, tensor)
        return SavedHandle(value)

    def _decide(self, tensor: Tensor, reason: str, is_kept: bool = False) -> None:
        """Record the decision to save the memory of a tensor, or not to."""
        storage = tensor.untyped_storage()
        if self._producers is not None:
            made_by, flops_per_byte = self._producers.of(tensor)
            new_bytes = 0 if storage_id(storage) in self._kept else storage.nbytes()
            self._decisions.append(Decision(made_by, new_bytes, is_kept, reason, flops_per_byte, self.place))
        if is_kept:
            self._kept.add(storage_id(storage))

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
                elif source.kept is None and source.recipe is not None:
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
            return "the inputs of its recipe are not smaller"
        if depth > self._depth:
            return f"it would be the end of a chain of {depth} recipes"
        value.adopt(depth, through)
        for source, start in starts:
            self._start_from(source, start)
        return None

    def _start_from(self, value: TrackedTensor, tensor: Tensor) -> None:
        """Save an input of recipes, or a copy of it that no in-place write can reach."""
        if value.is_copied:
            if value.kept is not None:
                self._release(value.kept)
            tensor = _copy(tensor)
            value.is_copied = value.is_external = False
            value.clock, value.kept = self._clock, None
        if value.kept is None:
            self._decide(tensor, INPUT, is_kept=True)
            value.keep(tensor)
        self._started_from.setdefault(storage_id(tensor.untyped_storage()), set()).add(value)

    def _copy_before_it_is_overwritten(self, tensor: Tensor) -> None:
        """Copy the inputs of recipes out of memory that the next operation overwrites.

        The write is legal: in plain training nothing would need the old contents.
        """
        if self._started_from and _is_plain(tensor):
            for value in self._started_from.pop(storage_id(tensor.untyped_storage()), ()):
                if value.kept is not None:
                    self._release(value.kept)
                    value.keep(_copy(value.kept))
                    value.is_copied = value.is_external = False
                    value.clock = self._clock

    def _release(self, tensor: Tensor) -> None:
        """Forget that the memory of a tensor is saved: a copy replaces it, so that its address may be reused."""
        address = storage_id(tensor.untyped_storage())
        if all(storage_id(storage) != address for storage in self._parameters):
            self._kept.discard(address)


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


def _written_tensors(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes into."""
    written: list[Tensor] = []
    for position, name in written_arguments(operation):
        arg = args[position] if position < len(args) else kwargs.get(name)
        written += [each for each in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(each, Tensor)]
    return written


def _is_external(tensor: Tensor) -> bool:
    """Return whether a tensor's memory belongs to numpy, another process or the like, which may write at any time."""
    return not tensor.untyped_storage().resizable()


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


def _are_plain(args: Sequence[Any]) -> bool:
    """Return whether all tensors, also those in lists, are plain."""
    for arg in args:
        if isinstance(arg, Tensor):
            if not _is_plain(arg):
                return False
        elif isinstance(arg, (list, tuple)) and not _are_plain(arg):
            return False
    return True


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

    def note(self, operation: Operation, args: tuple[Any, ...], out: Any) -> None:
        """Record the outputs of an operation."""
        flops = flops_of(operation, args, out)
        price = None if flops is None else flops / out.nbytes
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                maker, price_of_base = str(operation).rpartition(".")[0], price
                rule = RULES.get(operation)
                if rule is not None and rule.is_view:  # costs what its base costs
                    maker, price_of_base = self.of(args[0])
                self._of[id(each)] = weakref.ref(each), maker, price_of_base

    def of(self, tensor: Tensor) -> tuple[str, float | None]:
        """Return the name of the operation, and FLOP per byte of output for a convolution or a matrix product."""
        live, maker, price = self._of.get(id(tensor), (None, "", None))
        return (maker, price) if live is not None and live() is tensor else ("", None)


def _unpack(packed: Any) -> Tensor:
    return packed.unpack() if isinstance(packed, SavedHandle) else unmodified(*packed)
