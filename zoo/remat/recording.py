"""What watches a forward pass and decides, for each tensor that autograd saves, whether to keep it or its recipe."""

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

from zoo.ops.context import is_transformed
from zoo.remat.budget import START, Budget, Decision
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
from zoo.remat.recipes import Call, Saved, Store, Value, unmodified
from zoo.torch_internals import (
    DisableTorchDispatch,
    TorchDispatchMode,
    before_hooks_are_disabled,
    count_writes,
    is_wrapper,
    may_overlap,
    schema_of,
    skip_autograd_and_autocast,
    storage_id,
    top_saved_tensors_hooks,
)

DEPTH = 4  # saved values that a recipe may pass through, so that backward never computes long histories at once
SMALLEST_BYTES = 2**16  # what is smaller is kept: a recipe would cost more time than the memory is worth


class Recording(TorchDispatchMode):
    """A context in which autograd keeps recipes of tensors in place of the tensors, where that takes less memory.

    Gradients, outputs, running statistics and random numbers are the same bits as without it. Backward may run inside
    or outside of the context. A context can be entered again, for another forward pass, but not while it is active.

    Backward raises RecipeError if a tensor that a recipe starts from was overwritten since.

    Args:
    - `budget`: how much recomputation of convolutions and matrix products is allowed, as `Budget.parse` takes it; one
      that limits bytes is told at the end of each pass what was held.
    - `depth`: saved values that a recipe may pass through. More of them hold less, and have a larger peak in backward.
    - `smallest_bytes`: smaller tensors are kept themselves.
    - `parameters`: tensors that are there all the time, so that recipes may start from them for nothing.
    - `log`: is given each decision; None: decisions are not noted.
    - `exact`: False fuses batch norms with their activations (`zoo.remat.fusing`): results equal to rounding only.
    - `is_hooked`: whether hooks may read the outputs of norms, in any thread; fused norms then always write them.

    ``place`` may be set while it is active; the decisions name it.
    """

    def __init__(
        self,
        budget: Budget | float | int | str | None = None,
        *,
        depth: int = DEPTH,
        smallest_bytes: int = SMALLEST_BYTES,
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

    def __enter__(self) -> Recording:
        """Begin to record."""
        # By the id of a tensor: the tensor, its version then, and its value.
        self._known: dict[int, tuple[Callable[[], Tensor | None], int, Value]] = {}
        # Addresses of the storages that are kept anyway.
        self._kept = {storage_id(storage) for storage in self._parameters}
        # By the address of a storage: kept values in it that recipes start from, of which autograd does not know.
        self._started_from: dict[int, set[Value]] = {}
        # By the address of a storage: the count of writes into any memory, at the last one into it.
        self._writes: dict[int, int] = {}
        self._clock = 0
        self._makers = Makers() if self._log is not None or self._budget.is_limited else None
        self._decisions: list[Decision] = []
        self._store = Store()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._fused = None
        if not self._exact:
            self._fused = FusedNorms(self._note_norm, self._keeps_what_is_saved, always_writes=self._is_hooked)
        self._contexts = ExitStack()
        with ExitStack() as contexts:  # leaves again what was entered before an interruption
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
        """Stop recording; what backward needs stays."""
        self._contexts.__exit__(*error)
        # Some refer to this.
        del self._contexts, self._hooks, self._fused, self._known, self._kept, self._started_from, self._makers
        if self._log is not None:
            self._log += self._decisions
        if self._budget.is_limited and error[0] is None:
            self._budget.observe(self._decisions)
        del self._decisions

    def __torch_dispatch__(
        self, operation: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note how its outputs can be computed again."""
        kwargs = kwargs or {}
        if self._fused is not None:
            self._fused.write()
        # Transforms of torch.func run operations on tensors of their own.
        is_recorded = torch.is_grad_enabled() and not is_transformed()
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
            if self._makers is not None:
                self._makers.note(operation, args, out)
        return out

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which autograd keeps tensors without recipes."""
        self._hooks.__exit__()
        try:
            yield
        finally:
            self._hooks.__enter__()

    def _is_large(self, out: Any) -> bool:
        """Return whether an output may be worth a recipe; a small one is kept all the same, to start recipes from."""
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
            if values[0].call is not None:
                self._known[id(out)] = weakref.ref(out), out._version, values[0]
            return  # the copy of a kept tensor is made because one of them will be overwritten
        call = _call_of(rule, values, kwargs, args)
        if rule.repeat is CONCATENATE:
            call.parts = args[0]  # often nobody else needs the last one, and the recipe has to start from it
        if isinstance(out, Tensor):
            self._note(out, call, 0, out._version)
        else:
            notes = [self._note(each, call, index, each._version) for index, each in enumerate(out)]
            call.outputs = [weakref.ref(value) for value in notes]

    def _record_write(self, rule: Rule, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that overwrites its first argument, and note how the result can be computed again."""
        target = args[0]
        call = None
        before = self._find(target)
        if (
            before is not None
            and before.call is not None  # what a kept tensor was computed from exists no more
            and self._is_large(target)
            and _are_plain(args)
            and not may_overlap(target)  # what lies in one place would be computed several times
            and not any(isinstance(arg, Tensor) for arg in kwargs.values())
        ):
            # The values of before the write, as another argument may share the memory.
            values = tuple([self._value_of(arg) for arg in args])
            call = _call_of(rule, values, kwargs, args)
        self._copy_before_it_is_overwritten(target)
        out = operation(*args, **kwargs)
        self._note_write(target)
        if call is None:
            self._known.pop(id(target), None)
        else:
            self._note(out, call, 0, out._version + 1)  # the write is counted after this returns
        if self._makers is not None:
            self._makers.note(operation, args, out)
        return out

    def _record_batch_norm(self, operation: Operation, args: tuple[Any, ...], outputs: Any) -> None:
        with skip_autograd_and_autocast(), DisableTorchDispatch():
            repeat, arguments = recipe_of_batch_norm(operation, args, outputs)
        # The line's two vectors are new and small: the call itself keeps them.
        own = arguments[1:] if repeat is apply_line else ()
        values = [self._value_of(each) for each in arguments[: len(arguments) - len(own)]]
        self._note(outputs[0], Call(repeat, (*values, *own), {}, is_view=False), 0, outputs[0]._version)

    def _note_norm(self, out: Tensor, operation: Operation, args: tuple[Any, ...]) -> None:
        x, weight, bias, *rest = args
        # What follows from the statistics is new and small: the call itself keeps it.
        if rest[-1] == "identity" and (line := line_of_norm(*args[:-1])) is not None:
            call = Call(apply_line, (self._value_of(x), *line, None, False), {}, is_view=False)
        else:
            call = Call(operation, (*map(self._value_of, (x, weight, bias)), *rest), {}, is_view=False)
        self._note(out, call, 0, out._version)
        if self._makers is not None:
            self._makers.note(torch.ops.zoo.norm_act.default, args, out)

    def _keeps_what_is_saved(self) -> bool:
        """Return whether no other hooks decide about saved tensors, as those of a checkpoint do."""
        hooks = top_saved_tensors_hooks(False)
        return hooks is not None and hooks[0] == self._pack

    def _record_mask(self, operation: Operation, out: Any) -> None:
        """Note that the mask of a dropout can be made of its bits, which it takes no random numbers to do."""
        position = MASKS[operation]
        mask = out if position is None else out[position]
        if mask.nbytes >= self._smallest_bytes and mask.numel() > 0:
            with DisableTorchDispatch(), torch.no_grad():
                bits = bits_of(mask)
            call = Call(mask_of, (self._note(bits, None, 0, 0), mask.shape, mask.dtype), {}, is_view=False)
            call.parts = (bits,)  # nobody else needs them
            self._note(mask, call, 0, mask._version + schema_of(operation).is_mutable)

    def _note(self, tensor: Tensor, call: Call | None, index: int, version: int) -> Value:
        value = Value(call, index, tensor, version, self._store, self._clock)
        self._known[id(tensor)] = value.live, version, value
        return value

    def _note_write(self, tensor: Tensor) -> None:
        """Note that an operation has written into the memory of a tensor, through whatever alias."""
        if _is_plain(tensor):
            self._clock += 1
            self._writes[storage_id(tensor.untyped_storage())] = self._clock

    def _find(self, tensor: Tensor) -> Value | None:
        """Return the value that a tensor holds now; None if it is not known."""
        live, version, value = self._known.get(id(tensor), (None, 0, None))
        if live is None or live() is not tensor or version != tensor._version or self._was_written(tensor, value):
            return None
        return value

    def _was_written(self, tensor: Tensor, value: Value | None) -> bool:
        """Return whether a tensor's memory was written since it held a value. Not all writes move its version."""
        if not self._writes or value is None:
            return False
        return self._writes.get(storage_id(tensor.untyped_storage()), 0) > value.clock

    def _value_of(self, arg: Any) -> Any:
        """Return the value of a tensor, those of a list of tensors, and anything else as it is."""
        if isinstance(arg, Tensor):
            return self._find(arg) or self._note_external(arg)
        if isinstance(arg, (list, tuple)) and any(isinstance(each, Tensor) for each in arg):
            return [self._value_of(each) for each in arg]
        return arg

    def _note_external(self, tensor: Tensor) -> Value:
        """Return the new value of a tensor that no recorded operation has made."""
        if tensor.nbytes < self._smallest_bytes and not isinstance(tensor, Parameter):
            copy = _copy(tensor)  # for recipes, when nobody else needs it, or when its memory holds something else
            value = Value(None, 0, copy, copy._version, self._store, self._clock)
            value.live = lambda: copy
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, value
            return value
        value = self._note(tensor, None, 0, tensor._version)
        value.is_external = _is_external(tensor)
        if tensor.nbytes < self._smallest_bytes:
            value.live = lambda: tensor  # a parameter that may be made for this call only
        return value

    def _pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in place of a tensor."""
        if not _is_plain(tensor):
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        value = self._find(tensor)
        if value is None:
            if tensor.is_leaf:
                self._decide(tensor, "not an operation that is repeated", is_kept=True)
                return tensor, tensor._version
            value = self._note(tensor, None, 0, tensor._version)
        if value.readers == 0 and value.kept is None:
            reason = self._reason_to_keep(value, tensor)
            if reason is None:
                self._decide(tensor, "repeated in backward")
            else:
                self._decide(tensor, reason, is_kept=True)
                value.keep(tensor)
                value.is_copied = tensor.nbytes < self._smallest_bytes and not isinstance(tensor, Parameter)
                value.is_external = _is_external(tensor)
                if value.recipes > 0:  # those that pass through it start from it now
                    self._start_from(value, tensor)
        return Saved(value)

    def _decide(self, tensor: Tensor, reason: str, is_kept: bool = False) -> None:
        """Note that the memory of a tensor is kept, or is not."""
        storage = tensor.untyped_storage()
        if self._makers is not None:
            made_by, flops_per_byte = self._makers.of(tensor)
            new_bytes = 0 if storage_id(storage) in self._kept else storage.nbytes()
            self._decisions.append(Decision(made_by, new_bytes, is_kept, reason, flops_per_byte, self.place))
        if is_kept:
            self._kept.add(storage_id(storage))

    def _reason_to_keep(self, value: Value, tensor: Tensor) -> str | None:
        """Return why the tensor is to be kept; None if its recipe is, and all that this starts from from now on.

        The recipe is kept if what has to be kept for it alone takes fewer bytes than the tensor.
        """
        if value.call is None:
            return "not an operation that is repeated"
        storage = tensor.untyped_storage()
        own_bytes = storage.nbytes()
        if own_bytes < self._smallest_bytes:
            return "small"
        if storage_id(storage) in self._kept:
            return "shares memory that is kept"
        through: list[Value] = []
        starts: list[tuple[Value, Tensor]] = []
        costs: dict[int, int] = {}
        seen, pending, depth = {value}, [value.call], 0
        while pending:
            for source in pending.pop().sources():
                if source in seen:
                    continue
                seen.add(source)
                if source.kept is None and source.readers > 0:  # a recipe: all that it starts from is kept
                    depth = max(depth, source.depth + 1)
                elif source.kept is None and source.call is not None:
                    through.append(source)
                    pending.append(source.call)
                else:
                    start = source.live() if source.kept is None else source.kept
                    if start is None:
                        return "what it was made of is gone"
                    if source.is_external and not source.is_copied:
                        return "what it was made of may be overwritten from outside of torch"
                    if start._version != source.version or self._was_written(start, source):
                        return "what it was made of was overwritten"
                    starts.append((source, start))
                    if source.is_copied:
                        costs[id(start)] = start.nbytes
                    elif source.kept is None:
                        memory = start.untyped_storage()
                        if storage_id(memory) not in self._kept:
                            costs[storage_id(memory)] = memory.nbytes()
        # The parts of a concatenation are worth more than the whole: they are often parts of the next one too.
        limit = own_bytes if value.call.operation is CONCATENATE else own_bytes - 1
        if sum(costs.values()) > limit:
            return "what it was made of is not smaller"
        if depth > self._depth:
            return f"its recipe would pass through {depth} others"
        value.adopt(depth, through)
        for source, start in starts:
            self._start_from(source, start)
        return None

    def _start_from(self, value: Value, tensor: Tensor) -> None:
        """Keep the tensor that holds a value for recipes, or a copy that no other write can reach."""
        if value.is_copied:
            tensor = _copy(tensor)
            value.is_copied = value.is_external = False
            value.clock, value.kept = self._clock, None
        if value.kept is None:
            self._decide(tensor, START, is_kept=True)
            value.keep(tensor)
        self._started_from.setdefault(storage_id(tensor.untyped_storage()), set()).add(value)

    def _copy_before_it_is_overwritten(self, tensor: Tensor) -> None:
        """Copy what recipes start from out of a tensor's memory, into which an operation writes next.

        Without recipes nobody would have needed it any more, so that the operation is right.
        """
        if self._started_from and _is_plain(tensor):
            for value in self._started_from.pop(storage_id(tensor.untyped_storage()), ()):
                if value.kept is not None:
                    value.keep(_copy(value.kept))
                    value.is_copied = value.is_external = False
                    value.clock = self._clock


class _Active(threading.local):
    """The recordings that are active in a thread, the innermost last."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []


_active = _Active()


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Return a context in which the innermost recording has no hooks for saved tensors, so that torch.func can run."""
    recording = _active.recordings[-1] if _active.recordings else None
    if recording is None or not recording._keeps_what_is_saved():
        yield
    else:
        with recording.suspended():
            yield


before_hooks_are_disabled(_without_hooks)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, in memory of its own, that has no history."""
    with DisableTorchDispatch(), torch.no_grad():
        once = tensor  # each element of an expanded tensor once, as torch does not write into all at one place
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
    """Return whether others may write into a tensor's memory, such as numpy or another process, at any time."""
    return not tensor.untyped_storage().resizable()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory of its own, with strides, and counts its modifications.

    Not so: sparse and nested tensors, subclasses that wrap other tensors, and those of `torch.inference_mode`.
    """
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter or not _is_wrapper(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_inference()
    )


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory of its own, but that of others, or none yet."""
    return is_lazy(tensor) or is_wrapper(tensor)


def _are_plain(args: Sequence[Any]) -> bool:
    """Return whether all tensors, and those in lists, are plain."""
    for arg in args:
        if isinstance(arg, Tensor):
            if not _is_plain(arg):
                return False
        elif isinstance(arg, (list, tuple)) and not _are_plain(arg):
            return False
    return True


def _call_of(rule: Rule, values: Sequence[Any], kwargs: Any, args: Sequence[Any]) -> Call:
    """Return the call that repeats an operation, together with the batch norm before it where that is possible."""
    return _joined(rule.repeat, values, kwargs, args) or Call(rule.repeat, tuple(values), kwargs, rule.is_view)


def _joined(operation: Operation, values: Sequence[Any], kwargs: Any, args: Sequence[Any]) -> Call | None:
    """Return the call that does an operation together with the batch norm before it; None if there is no such call.

    A sum's other term must lie in memory as the norm's output does. ``args`` are the tensors of the ``values``.
    """
    if operation is RELU:
        norm = values[0].call
        if norm is not None and norm.operation is apply_line and values[0].readers == 0:
            return Call(apply_line, (*norm.args[:4], True), {}, is_view=False)
    elif operation is ADD and not kwargs and isinstance(args[1], Tensor):
        a, b = args
        if a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride():
            for value, other in (values, reversed(values)):
                norm = value.call
                if norm is not None and norm.operation is apply_line and value.readers == 0:
                    x, alpha, beta, shortcut, is_rectified = norm.args
                    if shortcut is None and not is_rectified:
                        return Call(apply_line, (x, alpha, beta, other, False), {}, is_view=False)
    return None


class Makers:
    """Which operations made the tensors of a forward pass."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], str, float | None]] = {}

    def note(self, operation: Operation, args: tuple[Any, ...], out: Any) -> None:
        """Note the tensors that an operation has returned."""
        flops = flops_of(operation, args, out)
        price = None if flops is None else flops / out.nbytes
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                maker, price_of_base = str(operation).rpartition(".")[0], price
                rule = RULES.get(operation)
                if rule is not None and rule.is_view:  # as costly as the tensor that it shows
                    maker, price_of_base = self.of(args[0])
                self._of[id(each)] = weakref.ref(each), maker, price_of_base

    def of(self, tensor: Tensor) -> tuple[str, float | None]:
        """Return the name of the operation and the floating-point operations for each byte, if it costs any."""
        live, maker, price = self._of.get(id(tensor), (None, "", None))
        return (maker, price) if live is not None and live() is tensor else ("", None)


def _unpack(packed: Any) -> Tensor:
    return packed.unpack() if isinstance(packed, Saved) else unmodified(*packed)
