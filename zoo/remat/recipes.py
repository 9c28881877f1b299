"""Values, the calls that make them, and how backward computes a value again."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.errors import ZooError
from zoo.remat.operations import IN_PLACE, Operation
from zoo.torch_internals import DisableTorchDispatch, is_alias_of, skip_autograd_and_autocast

ROOM = 3  # values of the size of the largest that backward keeps between two uses


class RecipeError(ZooError, RuntimeError):
    """What a recipe starts from was overwritten or freed between forward and backward."""


class Value:
    """What a tensor held between two operations that wrote into it.

    Args:
    - `call`: the call that computes it again; None if it cannot be, or is kept.
    - `index`: its position among the call's outputs.
    - `tensor`: the tensor that holds it now; it is not kept alive.
    - `version`: the version of the tensor that holds it, or that is kept, while it holds it.
    - `store`: where backward keeps it between two uses.
    - `clock`: the recording's count of writes when the tensor held it.

    ``is_copied`` is True if recipes start from a copy of the tensor that holds it, and ``is_external`` if they never
    start from it.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "clock",
        "depth",
        "dtype",
        "index",
        "is_copied",
        "is_external",
        "kept",
        "live",
        "readers",
        "recipes",
        "store",
        "stride",
        "through",
        "version",
        "waiting",
    )

    def __init__(self, call: Call | None, index: int, tensor: Tensor, version: int, store: Store, clock: int) -> None:
        self.call, self.index, self.version, self.store, self.clock = call, index, version, store, clock
        self.is_copied = self.is_external = False
        self.live: Callable[[], Tensor | None] = weakref.ref(tensor)
        self.stride, self.dtype = tensor.stride(), tensor.dtype
        self.kept: Tensor | None = None
        self.readers = 0  # of autograd's saved tensors, in all
        self.waiting = 0  # of them, those that have not asked for it yet
        self.depth = 0  # saved values that its recipe passes through
        self.through: Sequence[Value] = ()  # the other values that its recipe passes through
        self.recipes = 0  # that pass through it, where it is not saved itself

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor itself from now on, in place of a recipe."""
        if tensor.requires_grad:  # its history may be what saves it, so that it would never be freed
            with DisableTorchDispatch(), torch.no_grad():
                tensor = tensor.detach()
        self.kept, self.version, self.call = tensor, tensor._version, None

    def adopt(self, depth: int, through: Sequence[Value]) -> None:
        """Keep the recipe from now on, with these values on its way; its readers let go of it."""
        self.depth, self.through = depth, through
        for value in (self, *through):
            assert value.call is not None, "a value on the way of a recipe has one of its own"
            value.call.parts = ()
        for value in through:
            value.recipes += 1

    def let_go(self) -> None:
        """Forget the recipe, and drop from the store what was there for it alone."""
        for value in self.through:
            value.recipes -= 1
            value.drop_if_unused()
        self.through = ()
        self.drop_if_unused()

    def drop_if_unused(self) -> None:
        """Drop the value from the store if no saved tensor and no recipe needs it any more."""
        if self.readers == 0 and self.recipes == 0:
            self.store.drop(self)

    @property
    def is_worth_storing(self) -> bool:
        """Whether backward will ask for it again, computed once: for itself, or on the way to several others."""
        return self.readers > 0 or (self.recipes > 1 and self.call is not None and not self.call.is_view)

    def at_hand(self) -> Tensor | None:
        """Return the tensor if it is kept, or was computed already; RecipeError if it was overwritten since."""
        return self.store.get(self) if self.kept is None else unmodified(self.kept, self.version)


class Call:
    """An operation, of values and constants, that can be repeated.

    Args:
    - `operation`: overwrites nothing.
    - `args`: values and lists of values in place of tensors.
    - `kwargs`: without tensors.
    - `is_view`: whether the output shares the memory of the first argument.

    ``parts`` are tensors that are kept alive until it is decided whether the output or its recipe is kept.
    """

    __slots__ = ("args", "is_view", "kwargs", "operation", "outputs", "parts")

    def __init__(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool) -> None:
        self.operation, self.args, self.kwargs, self.is_view = operation, args, kwargs, is_view
        self.outputs: list[weakref.ref[Value]] = []  # those of an operation with several; the values hold the call
        self.parts: Sequence[Tensor] = ()

    def sources(self) -> Iterator[Value]:
        """Yield the values that it takes, some of them several times."""
        for arg in self.args:
            if type(arg) is Value:
                yield arg
            elif type(arg) is list:
                for each in arg:
                    if type(each) is Value:
                        yield each


class Store:
    """Recomputed values that backward needs again, in the order of their last use.

    It holds `ROOM` times the largest of them; then it evicts the value that was used the longest ago, which is
    recomputed when it is needed. A tensor that was modified in the meantime, as the backward pass of a custom function
    may do, counts as evicted.
    """

    def __init__(self) -> None:
        self._tensors: dict[Value, tuple[Tensor, int]] = {}  # with the version that was stored
        self._largest = self._total = 0
        self._lock = threading.RLock()  # a graph on several devices runs backward in several threads

    def get(self, value: Value) -> Tensor | None:
        """Return the tensor of a value, which becomes the youngest; None if it is not here."""
        with self._lock:
            tensor, version = self._tensors.get(value, (None, 0))
            if tensor is not None:
                self.drop(value)
                if tensor._version != version:
                    return None
                self._insert(value, tensor)
            return tensor

    def put(self, value: Value, tensor: Tensor) -> None:
        """Keep a value until it is dropped, or until its room is needed."""
        with self._lock:
            self.drop(value)
            self._insert(value, tensor)
            while self._total > ROOM * self._largest:
                self.drop(next(iter(self._tensors)))

    def drop(self, value: Value) -> None:
        """Let go of a value, if it is here."""
        with self._lock:
            tensor, _ = self._tensors.pop(value, (None, 0))
            if tensor is not None:
                self._total -= tensor.nbytes

    def _insert(self, value: Value, tensor: Tensor) -> None:
        self._tensors[value] = tensor, tensor._version
        self._total += tensor.nbytes
        self._largest = max(self._largest, tensor.nbytes)


class Saved:
    """What autograd holds in place of a tensor that it saves for backward."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value
        value.readers += 1
        value.waiting += 1

    def __del__(self) -> None:
        value = self.value
        value.readers -= 1
        if value.readers == 0:
            value.let_go()

    def unpack(self) -> Tensor:
        """Return the tensor, computed again if it is not at hand; RecipeError if it cannot be."""
        value = self.value
        tensor = value.at_hand()
        if tensor is None:
            with skip_autograd_and_autocast(), torch.no_grad():
                tensor = compute(value)
        if value.kept is None:
            value.waiting -= 1
            if value.waiting > 0:
                if value.store.get(value) is None:
                    value.store.put(value, tensor)
            else:  # of a graph that is retained, the next backward begins anew
                value.store.drop(value)
                value.waiting = value.readers
        return tensor


def unmodified(tensor: Tensor, version: int) -> Tensor:
    """Return the tensor, which must have the version that was kept; RecipeError otherwise."""
    if tensor._version != version:
        raise RecipeError(
            f"a tensor {tuple(tensor.shape)} {tensor.dtype} that backward needs has been modified in place after "
            f"forward used it (it is at version {tensor._version}, not {version}); do not overwrite what goes into the "
            "network, comes out of it, or its parameters between forward and backward, or clone() it first"
        )
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and _has_memory(tensor):
        raise RecipeError(
            f"the memory of a tensor {tuple(tensor.shape)} {tensor.dtype} that backward needs was freed after forward, "
            "as sharded parameters are; leave such parts of the network out of zoo.lean"
        )
    return tensor


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor needs memory."""
    return tensor.numel() > 0 and tensor.device.type != "meta"


def compute(target: Value) -> Tensor:
    """Return a value that is not at hand, by the calls that made it; those in between are not kept.

    Values in between that backward will need again are put into their store. Raises RecipeError if what the recipe
    starts from was overwritten or freed.
    """
    tensors: dict[Value, Tensor] = {}
    fresh: set[Value] = set()  # alone in memory that was allocated here, so that an operation may overwrite them
    order, uses = _plan(target, tensors)
    for value in order:
        if value in tensors:
            continue  # an output of a call that has been run
        call = value.call
        assert call is not None, "values without a call are at hand"
        args = tuple([_filled(arg, tensors) for arg in call.args])
        operation = call.operation
        if call.args and type(call.args[0]) is Value and call.args[0] in fresh and uses[call.args[0]] == 1:
            in_place = IN_PLACE.get(operation)
            if in_place is not None and args[0].dtype == value.dtype and _are_alike(args):
                operation = in_place
                del tensors[call.args[0]]  # which is no more
        outputs = operation(*args, **call.kwargs)
        if isinstance(outputs, Tensor):
            _take(value, outputs, target, tensors, fresh, call)
        else:
            for other in (reference() for reference in call.outputs):
                if other is not None and (other in uses or other.readers > 0):
                    _take(other, outputs[other.index], target, tensors, fresh, call)
        for source in call.sources():
            uses[source] -= 1
            if uses[source] == 0:
                tensors.pop(source, None)
                fresh.discard(source)
    return tensors[target]


def _plan(target: Value, tensors: dict[Value, Tensor]) -> tuple[list[Value], Counter[Value]]:
    """Return the values to compute, sources first, and how often each is used; put those at hand into ``tensors``."""
    order: list[Value] = []
    uses: Counter[Value] = Counter((target,))
    seen: set[Value] = set()
    pending: list[tuple[Value, bool]] = [(target, False)]
    while pending:
        value, has_sources = pending.pop()
        if has_sources:
            order.append(value)
        elif value not in seen:
            seen.add(value)
            tensor = value.at_hand()
            if tensor is not None:
                tensors[value] = tensor
                continue
            assert value.call is not None, "what a recipe starts from is kept"
            pending.append((value, True))
            for source in value.call.sources():
                uses[source] += 1
                pending.append((source, False))
    return order, uses


def _take(
    value: Value, tensor: Tensor, target: Value, tensors: dict[Value, Tensor], fresh: set[Value], call: Call
) -> None:
    """Put a computed value, laid out in memory and rounded as it was, where it is needed.

    Kernels may add numbers up in another order for another layout. What was written over a tensor has that tensor's
    dtype, and not the one that the operation returns by itself. A value is fresh if it shares its memory with no other
    value, whichever operation made it; the sources of a view are fresh no more.
    """
    if tensor.stride() != value.stride or tensor.dtype != value.dtype:
        tensor = torch.empty_strided(tensor.shape, value.stride, dtype=value.dtype, device=tensor.device).copy_(tensor)
    sharing = [source for source in call.sources() if source in tensors and is_alias_of(tensor, tensors[source])]
    fresh.difference_update(sharing)
    tensors[value] = tensor
    if value.is_worth_storing and value is not target:
        value.store.put(value, tensor)
    elif not sharing:
        fresh.add(value)


def _filled(arg: Any, tensors: dict[Value, Tensor]) -> Any:
    if type(arg) is Value:
        return tensors[arg]
    if type(arg) is list:
        return [tensors[each] if type(each) is Value else each for each in arg]
    return arg


def _are_alike(args: tuple[Any, ...]) -> bool:
    """Return whether all tensors have one shape and dtype, so that the output has them too."""
    return len({(arg.shape, arg.dtype) for arg in args if isinstance(arg, Tensor)}) == 1
