"""Recipes: how backward recomputes a tensor that forward did not save."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from zoo.errors import ZooError
from zoo.remat._operations import Operation
from zoo.remat._rules import in_place_of
from zoo.torch_internals.compiler import never_compile
from zoo.torch_internals.data import counter_of, detach, is_alias_of
from zoo.torch_internals.dispatch import call_with_flags, count_writes, skip_autograd_and_autocast


class RecipeError(ZooError, RuntimeError):
    """An input of a recipe was overwritten or freed between forward and backward."""


class SavedTensor:
    """A saved tensor, held by autograd and by all recipes with it as an input.

    ``counter`` has the version counter of another tensor that shares the memory but not the counter; None without
    such a tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        # Detached: the graph may hold this object, and a tensor with a graph would close a reference cycle. Always a
        # new tensor object, so that it is freed with this object.
        self.tensor = detach(tensor)
        self.version = tensor._version
        self.watch(None)

    def watch(self, counter: Tensor | None) -> None:
        """Treat later writes counted by another version counter as writes into this tensor."""
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
    - `tensor`: the tensor with these contents; referenced weakly, like its storage (``memory``).
    - `version`: the version of that tensor.
    - `store`: holds the recomputed tensor in backward, and the settings of its operation.
    - `clock`: number of in-place writes that the rematerializer had counted.

    If ``is_copied`` is True, recipes use a copy as their input.
    """

    __slots__ = (
        "__weakref__", "_counter", "_saved", "clock", "dtype", "index", "inputs", "intermediates", "is_copied", "live",
        "memory", "number", "order", "readers", "recipe", "recipes", "recomputed_bytes", "store", "stride", "version",
        "waiting", "waiting_recipes",
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
        self.order = next(_orders)  # larger than for the inputs of its recipe
        self.number = -1  # index in the recorded forward pass; -1 if it is not in one
        self.readers = 0  # number of handles that autograd holds
        self.waiting = 0  # number of handles that this backward pass has not unpacked yet
        self.recomputed_bytes = 0  # size of its storage if its recipe is saved
        self.intermediates: Sequence[TrackedTensor] = ()  # tensors that its recipe recomputes on the way
        self.inputs: Sequence[SavedTensor] = ()  # inputs of its recipe; this reference keeps them alive
        self.recipes = 0  # number of recipes with this tensor as an intermediate
        self.waiting_recipes = 0  # number of them that this backward pass still needs

    @property
    def saved(self) -> SavedTensor | None:
        """The saved tensor; None if it is not saved."""
        return self._saved()

    @property
    def saved_tensor(self) -> Tensor | None:
        """The tensor if it is saved; None otherwise."""
        saved = self._saved()
        return None if saved is None else saved.tensor

    @property
    def is_recomputed(self) -> bool:
        """Whether autograd holds its recipe. A handle may instead hold a saved tensor that was copied later."""
        return self.readers > 0 and self.recipe is not None

    def watch(self, other: Tensor) -> None:
        """Treat writes into another tensor, which shares the memory but not the counter, as writes into this one."""
        if self._counter is None:
            with count_writes():  # otherwise, tensors below autograd share no version counter
                self._counter = counter_of(other)
            if (saved := self.saved) is not None:
                saved.watch(self._counter)

    def save(self, tensor: Tensor) -> SavedTensor:
        """Save the tensor instead of its recipe until the returned object is freed."""
        saved = SavedTensor(tensor)
        saved.watch(self._counter)
        self._saved, self.version = weakref.ref(saved), saved.version
        if self.recipes == 0 and self.readers == 0:  # nothing relies on the recipe
            self.recipe = None
        return saved

    def save_recipe(self, intermediates: Sequence[TrackedTensor], inputs: Sequence[SavedTensor]) -> None:
        """Save the recipe instead of the tensor. It recomputes ``intermediates`` from ``inputs``."""
        self.intermediates, self.inputs = intermediates, inputs
        for tracked in (self, *intermediates):
            assert tracked.recipe is not None, "an intermediate of a recipe has a recipe"
            tracked.recipe.parts = ()
        for tracked in intermediates:
            tracked.recipes += 1
            tracked.waiting_recipes += 1

    def finish(self) -> None:
        """Free the tensor, and those intermediates of its recipe that this backward pass no longer needs."""
        self.store.drop(self)
        self.waiting = self.readers  # with retain_graph=True, the next backward pass starts over
        for tracked in self.intermediates:
            tracked.waiting_recipes -= 1
            if tracked.waiting_recipes <= 0:
                tracked.waiting_recipes = tracked.recipes
                if tracked.readers == 0:
                    tracked.store.drop(tracked)

    def release(self) -> None:
        """Release the recipe and the tensor if neither autograd nor another recipe needs them."""
        unused = [self]
        for tracked in unused:  # grows
            if tracked.readers == 0 and tracked.recipes == 0:
                for intermediate in tracked.intermediates:
                    intermediate.recipes -= 1
                    intermediate.waiting_recipes = min(intermediate.waiting_recipes, intermediate.recipes)
                unused += tracked.intermediates
                tracked.intermediates = tracked.inputs = ()
                tracked.store.drop(tracked)

    @property
    def is_external(self) -> bool:
        """Whether other code, such as NumPy or another process, owns its memory and may overwrite it at any time."""
        saved = self.saved_tensor
        tensor = self.live() if saved is None else saved
        return tensor is not None and not tensor.untyped_storage().resizable()

    @property
    def is_worth_storing(self) -> bool:
        """Whether backward uses it again: autograd saved it, or it is an intermediate of several recipes."""
        return self.readers > 0 or (self.recipes > 1 and self.recipe is not None and not self.recipe.is_view)

    def available(self) -> Tensor | None:
        """Return the tensor if it is saved or stored; None otherwise. Raises RecipeError if it was overwritten."""
        saved = self.saved
        return self.store.get(self) if saved is None else saved.unpack()


def _nothing() -> None:
    return None


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor detached from its graph. The graph may hold saved tensors, which would be a reference cycle."""
    return detach(tensor) if tensor.requires_grad else tensor


class Recipe:
    """An operation and its arguments, from which backward recomputes a tensor.

    Args:
    - `operation`: a functional operation.
    - `args`: its positional arguments, with tracked tensors in place of tensors.
    - `kwargs`: its keyword arguments, none of them a tensor.
    - `is_view`: whether the output shares the memory of the first argument.

    ``parts`` are tensors that stay alive until the output or the recipe is saved.
    """

    def __init__(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], is_view: bool) -> None:
        self.operation, self.args, self.kwargs, self.is_view = operation, args, kwargs, is_view
        self.outputs: list[weakref.ref[TrackedTensor]] = []  # if there are several; weak, as they hold the recipe
        self.parts: Sequence[Tensor] = ()

    def sources(self) -> list[TrackedTensor]:
        """Return the inputs, repeated if the operation uses them several times."""
        found: list[TrackedTensor] = []
        for arg in self.args:
            if type(arg) is TrackedTensor:
                found.append(arg)
            elif type(arg) is list:
                found += [item for item in arg if type(item) is TrackedTensor]
        return found


class Store:
    """The recomputed tensors that backward needs again.

    A tensor modified in place, for example by the backward of a custom function, is recomputed.

    Args:
    - `flags`: the settings of forward that determine the bits of operations (`kernel_flags`).
    """

    def __init__(self, flags: tuple[Any, ...]) -> None:
        self.flags = flags
        self._tensors: dict[TrackedTensor, tuple[Tensor, int]] = {}  # with its version

    def get(self, tracked: TrackedTensor) -> Tensor | None:
        """Return a tensor; None if it is not stored."""
        tensor, version = self._tensors.get(tracked, (None, 0))
        return None if tensor is None or tensor._version != version else tensor

    def put(self, tracked: TrackedTensor, tensor: Tensor) -> None:
        """Store a tensor."""
        self._tensors[tracked] = tensor, tensor._version

    def drop(self, tracked: TrackedTensor) -> None:
        """Free a tensor if it is stored."""
        self._tensors.pop(tracked, None)


class SavedHandle:
    """The object that autograd holds in place of a tensor that backward recomputes.

    Args:
    - `tracked`: the tensor.
    - `schedule`: frees recomputed tensors when the plan says so; None without a plan.
    - `position`: index among the tensors that autograd saved in the pass.
    - `observer`: the observer of the pass, kept alive as long as a handle.
    """

    def __init__(
        self, tracked: TrackedTensor, schedule: Schedule | None = None, position: int = 0, observer: object = None
    ) -> None:
        self.tracked, self._schedule, self._position, self._observer = tracked, schedule, position, observer
        self._saved = tracked.saved  # keeps it alive
        tracked.readers += 1
        tracked.waiting += 1

    def __del__(self) -> None:
        tracked = self.tracked
        tracked.readers -= 1
        if tracked.readers == 0:
            tracked.release()

    def unpack(self) -> Tensor:
        """Return the tensor, recomputed if it is not stored. Raises RecipeError if it cannot be recomputed."""
        if torch.is_grad_enabled():  # in a backward pass that records a graph of its own
            with torch.no_grad():
                return self.unpack()
        tracked = self.tracked
        if self._schedule is not None:
            return self._schedule.read(self._position, tracked, self._saved)
        if self._saved is not None:
            return self._saved.unpack()
        tensor = tracked.available()
        if tensor is None:
            tensor = recomputed(tracked, lambda other: other.is_worth_storing and other is not tracked)
        if tracked.saved_tensor is not None:
            return tensor
        tracked.waiting -= 1
        if tracked.waiting > 0:
            if tracked.store.get(tracked) is None:
                tracked.store.put(tracked, tensor)
        else:
            tracked.finish()
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
    """Return a tensor. Raises RecipeError if its version is not ``version``, or if its memory was freed."""
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
    """Decides when backward recomputes tensors and when it frees them."""

    def read(self, position: int, tracked: TrackedTensor, saved: SavedTensor | None) -> Tensor:
        """Return the tensor that autograd saved at a position of the pass."""


def recomputed(target: TrackedTensor, stores: Callable[[TrackedTensor], bool]) -> Tensor:
    """Return a tensor, recomputed as forward computed it; see `compute`."""
    with skip_autograd_and_autocast():
        return compute(target, stores)


def compute(target: TrackedTensor, stores: Callable[[TrackedTensor], bool]) -> Tensor:
    """Recompute a tensor that is neither saved nor stored.

    Tensors for which ``stores`` returns True are stored; others are freed after their last use. Raises RecipeError if
    an input of the recipe was overwritten or freed.
    """
    assert target.recipe is not None, "tensors without a recipe are saved"
    tensors: dict[TrackedTensor, Tensor] = {}
    order, uses = _order(target, tensors)
    fresh: set[TrackedTensor] = set()  # sole owners of memory allocated here: operations may run in place
    for tracked in order:
        if tracked in tensors:
            continue  # already computed, with another output of the same recipe
        recipe = tracked.recipe
        assert recipe is not None, "tensors without a recipe are saved"
        args = [_filled(arg, tensors) for arg in recipe.args]
        operation = recipe.operation
        first = recipe.args[0] if recipe.args else None
        if (
            type(first) is TrackedTensor
            and first in fresh
            and uses[first] == 1
            and args[0].dtype == tracked.dtype
            and (in_place := in_place_of(operation)) is not None
            and _are_alike(args)
        ):
            operation = in_place
            del tensors[first]  # overwritten
        outputs = call_with_flags(tracked.store.flags, operation, *args, **recipe.kwargs)
        if isinstance(outputs, Tensor):
            _take(tracked, outputs, stores, tensors, fresh, recipe)
        else:
            for other in (reference() for reference in recipe.outputs):
                if other is not None and (other in uses or stores(other)):
                    _take(other, outputs[other.index], stores, tensors, fresh, recipe)
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
    """Return the tensors to recompute, in order of forward, and use counts. Adds saved and stored ones to ``tensors``.

    In another order, branches of a network might be computed long before their use.
    """
    order, seen, uses = [target], {target}, {target: 1}
    for tracked in order:
        assert tracked.recipe is not None, "the inputs of a recipe are saved"
        for source in tracked.recipe.sources():
            uses[source] = uses.get(source, 0) + 1
            if source not in seen:
                seen.add(source)
                tensor = source.available()
                if tensor is None:
                    order.append(source)
                else:
                    tensors[source] = tensor
    return sorted(order, key=lambda tracked: tracked.order), uses


def _take(
    tracked: TrackedTensor,
    tensor: Tensor,
    stores: Callable[[TrackedTensor], bool],
    tensors: dict[TrackedTensor, Tensor],
    fresh: set[TrackedTensor],
    recipe: Recipe,
) -> None:
    """Add a recomputed tensor to ``tensors``, and to the store if it is to be stored.

    The tensor is fresh unless it shares memory with an input. Such an input is not fresh any more.
    """
    tensor = _restored(tensor, tracked)
    sharing = [source for source in recipe.sources() if source in tensors and is_alias_of(tensor, tensors[source])]
    fresh.difference_update(sharing)
    tensors[tracked] = tensor
    if stores(tracked):
        tracked.store.put(tracked, tensor)
    elif not sharing:
        fresh.add(tracked)


def _restored(tensor: Tensor, tracked: TrackedTensor) -> Tensor:
    """Return a recomputed tensor with its strides and dtype of forward.

    Strides matter because kernels may sum in another order for another layout. The dtype differs if the original
    operation wrote in place into a tensor of another dtype.
    """
    if tensor.stride() == tracked.stride and tensor.dtype == tracked.dtype:
        return tensor
    return torch.empty_strided(tensor.shape, tracked.stride, dtype=tracked.dtype, device=tensor.device).copy_(tensor)


def _filled(arg: Any, tensors: dict[TrackedTensor, Tensor]) -> Any:
    if type(arg) is TrackedTensor:
        return tensors[arg]
    if type(arg) is list:
        return [tensors[item] if type(item) is TrackedTensor else item for item in arg]
    return arg


def _are_alike(args: Sequence[Any]) -> bool:
    """Return whether all tensors among the arguments, and hence the output, have the same shape and dtype."""
    return len({(arg.shape, arg.dtype) for arg in args if isinstance(arg, Tensor)}) == 1
