"""Recipes: how backward recomputes a tensor that forward did not save."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from zoo.errors import ZooError
from zoo.remat.operations import Operation
from zoo.remat.rules import in_place_of
from zoo.torch_internals.compiler import never_compile
from zoo.torch_internals.data import counter_of, detach, is_alias_of
from zoo.torch_internals.dispatch import call_with_flags, count_writes, skip_autograd_and_autocast


class RecipeError(ZooError, RuntimeError):
    """An input of a recipe was overwritten or freed between forward and backward."""


class SavedTensor:
    """A saved tensor, held by autograd and by all recipes that start from it.

    ``counter`` has the version counter of another tensor that shares the memory but not the counter; None if there is
    no such tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Detached, because the graph may hold this object, which would be a reference cycle. Always a new tensor
        # object, which lives only as long as this object.
        self.tensor = detach(tensor)
        self.version = tensor._version
        self.watch(None)

    def watch(self, counter: Tensor | None) -> None:
        """Regard writes that another version counter counts from now on as writes into this tensor."""
        self.counter, self._count = counter, 0 if counter is None else counter._version

    def unpack(self) -> Tensor:
        """Return the tensor. Raises RecipeError if it was overwritten."""
        if self.counter is not None and self.counter._version != self._count:
            raise_modified(self.tensor, self.counter._version, self._count)
        return unmodified(self.tensor, self.version)


_orders = count()


class TrackedTensor:
    """The contents of a tensor between two in-place writes.

    Args:
    - `recipe`: recomputes it; None if it cannot be recomputed, or is saved.
    - `index`: its position among the outputs of the recipe.
    - `tensor`: the tensor that has these contents; only weak references to it and to its storage (``memory``) are held.
    - `version`: that tensor's version counter.
    - `store`: has it in backward, between its first and its last use, and knows the settings of its operation.
    - `clock`: the rematerializer's count of in-place writes at the time.

    If ``is_copied`` is True, recipes use a copy as their input.
    """

    __slots__ = (
        "__weakref__", "_counter", "_saved", "clock", "dtype", "index", "is_copied", "live", "memory", "number",
        "order", "readers", "recipe", "recipes", "recomputed_bytes", "starts", "store", "stride", "through", "version",
        "waiting",
        "waiting_recipes",
    )  # fmt: skip

    def __init__(
        self, recipe: Recipe | None, index: int, tensor: Tensor, version: int, store: Store, clock: int
    ) -> None:
        self.recipe, self.index, self.version, self.store, self.clock = recipe, index, version, store, clock
        self.is_copied = False
        self.live: Callable[[], Tensor | None] = weakref.ref(tensor)
        self.memory = weakref.ref(tensor.untyped_storage())
        self.stride, self.dtype = tensor.stride(), tensor.dtype
        self._counter: Tensor | None = None
        self._saved: Callable[[], SavedTensor | None] = _nothing
        self.order = next(_orders)  # after the inputs of its recipe
        self.number = -1  # of the tensor in a recorded forward pass
        self.readers = 0  # number of handles that autograd holds
        self.waiting = 0  # number of handles that this backward pass has not unpacked yet
        self.recomputed_bytes = 0  # of its memory, if its recipe is saved
        self.through: Sequence[TrackedTensor] = ()  # intermediates that its recipe recomputes
        self.starts: Sequence[SavedTensor] = ()  # inputs of its recipe; kept alive by this reference
        self.recipes = 0  # number of recipes that have it as an intermediate
        self.waiting_recipes = 0  # number of them whose output this backward pass has not unpacked for the last time

    @property
    def saved(self) -> SavedTensor | None:
        """The saved tensor; None if it is not saved."""
        return self._saved()

    @property
    def kept(self) -> Tensor | None:
        """The tensor if it is saved, otherwise None."""
        saved = self._saved()
        return None if saved is None else saved.tensor

    @property
    def is_recomputed(self) -> bool:
        """Whether autograd holds its recipe; a handle may also hold an earlier saved tensor that was copied since."""
        return self.readers > 0 and self.recipe is not None

    def watch(self, other: Tensor) -> None:
        """Regard writes into another tensor as writes into this one, whose memory it shares but not its counter."""
        if self._counter is None:
            with count_writes():  # below autograd, tensors share no version counter otherwise
                self._counter = counter_of(other)
            if (saved := self.saved) is not None:
                saved.watch(self._counter)

    def keep(self, tensor: Tensor) -> SavedTensor:
        """Save the tensor instead of its recipe, for as long as the returned object lives."""
        saved = SavedTensor(tensor)
        saved.watch(self._counter)
        self._saved, self.version = weakref.ref(saved), saved.version
        if self.recipes == 0 and self.readers == 0:  # nothing relies on the recipe
            self.recipe = None
        return saved

    def adopt(self, through: Sequence[TrackedTensor], starts: Sequence[SavedTensor]) -> None:
        """Save the recipe instead of the tensor; it recomputes the intermediates ``through`` from ``starts``."""
        self.through, self.starts = through, starts
        for value in (self, *through):
            assert value.recipe is not None, "an intermediate of a recipe has a recipe"
            value.recipe.parts = ()
        for value in through:
            value.recipes += 1
            value.waiting_recipes += 1

    def finish(self) -> None:
        """Free the tensor and the intermediates of its recipe that this backward pass needs no more."""
        self.store.drop(self)
        self.waiting = self.readers  # with retain_graph=True, the next backward pass starts over
        for value in self.through:
            value.waiting_recipes -= 1
            if value.waiting_recipes <= 0:
                value.waiting_recipes = value.recipes
                if value.readers == 0:
                    value.store.drop(value)

    def release(self) -> None:
        """Release the recipe and the tensor if neither autograd nor another recipe needs them."""
        unused = [self]
        for value in unused:
            if value.readers == 0 and value.recipes == 0:
                for each in value.through:
                    each.recipes -= 1
                    each.waiting_recipes = min(each.waiting_recipes, each.recipes)
                unused += value.through
                value.through = value.starts = ()
                value.store.drop(value)

    @property
    def is_external(self) -> bool:
        """Whether other code, such as numpy or another process, owns its memory and may overwrite it at any time."""
        kept = self.kept
        tensor = self.live() if kept is None else kept
        return tensor is not None and not tensor.untyped_storage().resizable()

    @property
    def is_worth_storing(self) -> bool:
        """Whether backward will use it again: autograd saved it, or several recipes have it as an intermediate."""
        return self.readers > 0 or (self.recipes > 1 and self.recipe is not None and not self.recipe.is_view)

    def available(self) -> Tensor | None:
        """Return the tensor if it is saved or stored, otherwise None. Raises RecipeError if it was overwritten."""
        saved = self.saved
        return self.store.get(self) if saved is None else saved.unpack()


def _nothing() -> None:
    return None


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor detached from its graph, which may hold saved tensors: a reference cycle otherwise."""
    return detach(tensor) if tensor.requires_grad else tensor


class Recipe:
    """An operation with its arguments, which recomputes a tensor from others.

    Args:
    - `operation`: a functional operation.
    - `args`: with tracked tensors in place of tensors.
    - `kwargs`: without tensors.
    - `is_view`: whether the output shares the memory of the first argument.

    ``parts`` are tensors that stay alive until either the output or the recipe is saved.
    """

    def __init__(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool) -> None:
        self.operation, self.args, self.kwargs, self.is_view = operation, args, kwargs, is_view
        self.outputs: list[weakref.ref[TrackedTensor]] = []  # if there are several; they hold the recipe
        self.parts: Sequence[Tensor] = ()

    def sources(self) -> list[TrackedTensor]:
        """Return the inputs; an input that is used several times is repeated."""
        found: list[TrackedTensor] = []
        for arg in self.args:
            if type(arg) is TrackedTensor:
                found.append(arg)
            elif type(arg) is list:
                found += [each for each in arg if type(each) is TrackedTensor]
        return found


class Store:
    """The recomputed tensors that backward needs again.

    A tensor that was modified in place, as the backward of a custom function may do, is recomputed.

    Args:
    - `flags`: the settings of forward that the bits of operations depend on (`kernel_flags`).
    """

    def __init__(self, flags: tuple[Any, ...]) -> None:
        self.flags = flags
        self._tensors: dict[TrackedTensor, tuple[Tensor, int]] = {}  # with its version

    def get(self, value: TrackedTensor) -> Tensor | None:
        """Return a tensor; None if it is not stored."""
        tensor, version = self._tensors.get(value, (None, 0))
        return None if tensor is None or tensor._version != version else tensor

    def put(self, value: TrackedTensor, tensor: Tensor) -> None:
        """Store a tensor."""
        self._tensors[value] = tensor, tensor._version

    def drop(self, value: TrackedTensor) -> None:
        """Free a tensor if it is stored."""
        self._tensors.pop(value, None)


class SavedHandle:
    """The object that autograd holds in place of a tensor that backward recomputes.

    Args:
    - `value`: the tensor.
    - `schedule`: frees what a plan recomputes; None without a plan.
    - `position`: index among the tensors that autograd saved in the pass.
    - `observer`: the observer of the pass, which lives as long as a handle.
    """

    def __init__(
        self, value: TrackedTensor, schedule: Schedule | None = None, position: int = 0, observer: object = None
    ) -> None:
        self.value, self._schedule, self._position, self._observer = value, schedule, position, observer
        self._saved = value.saved  # holds it
        value.readers += 1
        value.waiting += 1

    def __del__(self) -> None:
        value = self.value
        value.readers -= 1
        if value.readers == 0:
            value.release()

    def unpack(self) -> Tensor:
        """Return the tensor, recomputed if it is not stored. Raises RecipeError if it cannot be recomputed."""
        if torch.is_grad_enabled():  # in a backward pass that records a graph of its own
            with torch.no_grad():
                return self.unpack()
        value = self.value
        if self._schedule is not None:
            return self._schedule.read(self._position, value, self._saved)
        if self._saved is not None:
            return self._saved.unpack()
        tensor = value.available()
        if tensor is None:
            tensor = recomputed(value, lambda each: each.is_worth_storing and each is not value)
        if value.kept is not None:
            return tensor
        value.waiting -= 1
        if value.waiting > 0:
            if value.store.get(value) is None:
                value.store.put(value, tensor)
        else:
            value.finish()
        return tensor


@never_compile
def unpack(packed: Any) -> Tensor:
    """Return the saved tensor for the object that autograd holds in its place."""
    return unmodified(*packed) if isinstance(packed, tuple) else packed.unpack()


def raise_modified(tensor: Tensor, version: int, saved_version: int) -> NoReturn:
    """Raise RecipeError for a tensor that was modified in place."""
    raise RecipeError(
        f"a tensor {tuple(tensor.shape)} {tensor.dtype} that backward needs was modified in place after "
        f"forward used it (it is at version {version}, not {saved_version}); do not overwrite inputs, outputs or "
        "parameters of the network between forward and backward, or clone() them first"
    )


def unmodified(tensor: Tensor, version: int) -> Tensor:
    """Return the tensor. Raises RecipeError if it was modified in place after this version, or its memory was freed."""
    if tensor._version != version:
        raise_modified(tensor, tensor._version, version)
    has_memory = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() > 0
    if not has_memory and tensor.numel() > 0 and tensor.device.type != "meta":
        raise RecipeError(
            f"the memory of a tensor {tuple(tensor.shape)} {tensor.dtype} that backward needs was freed after forward, "
            "as sharded parameters are; leave such parts of the network out of zoo.lean"
        )
    return tensor


class Schedule(Protocol):
    """When backward recomputes tensors, and when it frees them."""

    def read(self, position: int, value: TrackedTensor, saved: SavedTensor | None) -> Tensor:
        """Return the tensor that autograd saved at a position of the pass."""


def recomputed(target: TrackedTensor, keeps: Callable[[TrackedTensor], bool]) -> Tensor:
    """Return a tensor, recomputed as forward computed it; see `compute`."""
    with skip_autograd_and_autocast():
        return compute(target, keeps)


def compute(target: TrackedTensor, keeps: Callable[[TrackedTensor], bool]) -> Tensor:
    """Recompute a tensor that is neither saved nor stored.

    The tensors that ``keeps`` returns True for are stored; the others are freed after their last use. Raises
    RecipeError if an input of the recipe was overwritten or freed.
    """
    assert target.recipe is not None, "tensors without a recipe are saved"
    tensors: dict[TrackedTensor, Tensor] = {}
    order, uses = _order(target, tensors)
    fresh: set[TrackedTensor] = set()  # sole owners of memory allocated here: operations may run in place
    for value in order:
        if value in tensors:
            continue  # another output of a recipe that has run
        recipe = value.recipe
        assert recipe is not None, "tensors without a recipe are saved"
        args = [_filled(arg, tensors) for arg in recipe.args]
        operation = recipe.operation
        first = recipe.args[0] if recipe.args else None
        if (
            type(first) is TrackedTensor
            and first in fresh
            and uses[first] == 1
            and args[0].dtype == value.dtype
            and (in_place := in_place_of(operation)) is not None
            and _are_alike(args)
        ):
            operation = in_place
            del tensors[first]  # overwritten
        outputs = call_with_flags(value.store.flags, operation, *args, **recipe.kwargs)
        if isinstance(outputs, Tensor):
            _take(value, outputs, keeps, tensors, fresh, recipe)
        else:
            for other in (reference() for reference in recipe.outputs):
                if other is not None and (other in uses or keeps(other)):
                    _take(other, outputs[other.index], keeps, tensors, fresh, recipe)
        for source in recipe.sources():
            uses[source] -= 1
            if uses[source] == 0:
                tensors.pop(source, None)
                fresh.discard(source)
        del args, outputs
    return tensors[target]


def _order(
    target: TrackedTensor, tensors: dict[TrackedTensor, Tensor]
) -> tuple[list[TrackedTensor], dict[TrackedTensor, int]]:
    """Return what to recompute, in the order of forward, and use counts; put what is saved or stored into ``tensors``.

    In any other order, branches of a network might be computed long before they are used.
    """
    order, seen, uses = [target], {target}, {target: 1}
    for value in order:
        assert value.recipe is not None, "the inputs of a recipe are saved"
        for source in value.recipe.sources():
            uses[source] = uses.get(source, 0) + 1
            if source not in seen:
                seen.add(source)
                tensor = source.available()
                if tensor is None:
                    order.append(source)
                else:
                    tensors[source] = tensor
    return sorted(order, key=lambda each: each.order), uses


def _take(
    value: TrackedTensor,
    tensor: Tensor,
    keeps: Callable[[TrackedTensor], bool],
    tensors: dict[TrackedTensor, Tensor],
    fresh: set[TrackedTensor],
    recipe: Recipe,
) -> None:
    """Put a recomputed tensor into ``tensors`` and the store.

    A tensor is fresh if it shares its memory with no other, no matter which operation computed it; the inputs of a view
    are fresh no longer.
    """
    tensor = _restored(tensor, value)
    sharing = [source for source in recipe.sources() if source in tensors and is_alias_of(tensor, tensors[source])]
    fresh.difference_update(sharing)
    tensors[value] = tensor
    if keeps(value):
        value.store.put(value, tensor)
    elif not sharing:
        fresh.add(value)


def _restored(tensor: Tensor, value: TrackedTensor) -> Tensor:
    """Return a recomputed tensor with the strides and the dtype that it had in forward.

    Strides matter, as kernels may sum in another order for another layout. The dtype differs if the original operation
    wrote in place into a tensor of another dtype.
    """
    if tensor.stride() == value.stride and tensor.dtype == value.dtype:
        return tensor
    return torch.empty_strided(tensor.shape, value.stride, dtype=value.dtype, device=tensor.device).copy_(tensor)


def _filled(arg: Any, tensors: dict[TrackedTensor, Tensor]) -> Any:
    if type(arg) is TrackedTensor:
        return tensors[arg]
    if type(arg) is list:
        return [tensors[each] if type(each) is TrackedTensor else each for each in arg]
    return arg


def _are_alike(args: Sequence[Any]) -> bool:
    """Return whether all tensors have the same shape and dtype, and hence the output too."""
    return len({(arg.shape, arg.dtype) for arg in args if isinstance(arg, Tensor)}) == 1
