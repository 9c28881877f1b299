"""Records recipes of the outputs of operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zoo.remat._bits import bits_of, mask_of
from zoo.remat._cost import PRODUCTS
from zoo.remat._deciding import Decider
from zoo.remat._exact_norms import FASTER, FUSABLE, recipe_of_batch_norm
from zoo.remat._operations import (
    BATCH_NORMS,
    Operation,
    call_in_mode,
    call_with_keywords,
    writes_inside,
    written_arguments,
)
from zoo.remat._recipes import Recipe, TrackedTensor
from zoo.remat._rules import ADD, COPIES, ENLARGES, MASKS, RELU, UNSAFE_VIEW, Rule, rule_of
from zoo.remat._tracking import Tracker
from zoo.torch_internals.data import may_overlap, memory_id
from zoo.torch_internals.dispatch import (
    DisableTorchDispatch,
    HigherOrderOperator,
    count_writes,
)


class Recorder:
    """Records recipes of outputs, and writes into tensors."""

    def __init__(self, tracker: Tracker, decider: Decider) -> None:
        self._tracker, self._decider = tracker, decider

    def record(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation that writes into none of its arguments."""
        rule, tracker = traits.rule, self._tracker
        is_worthwhile = tracker.is_large(out) or (  # a small view may hold large memory
            rule.is_view and (id(args[0]) in tracker.known or tracker.is_large(args[0]))
        )
        if not is_worthwhile:
            return
        if rule.repeat in ENLARGES and self._has_mostly_small_parts(args[0], out):
            return  # the recipe would hold copies of the parts, which take as much memory
        if _has_tensors(kwargs):
            rule, args, kwargs = _without_keywords(rule, args, kwargs)
        inputs = tracker.tracked_args(args)
        if inputs is None:
            return
        if rule.repeat in COPIES and _is_copy(out, args[0]):
            if inputs[0].recipe is not None:
                tracker.note_copy(out, inputs[0])
            return  # a saved tensor is copied because one of the two will be overwritten
        recipe = _recipe_of(rule, inputs, kwargs, args)
        if rule.repeat in ENLARGES:
            recipe.parts = _smaller_inputs(args, out)
        # After this returns, autograd makes a view share the version counter of its base.
        base = args[0] if rule.is_view and rule.repeat is not UNSAFE_VIEW else None
        if rule.repeat is UNSAFE_VIEW:  # has its own version counter
            inputs[0].watch(out)
        if isinstance(out, Tensor):
            tracker.note(out, recipe, 0, out._version if base is None else base._version)
        else:
            outputs = [
                tracker.note(tensor, recipe, index, tensor._version if base is None else base._version)
                for index, tensor in enumerate(out)
                if isinstance(tensor, Tensor)  # others are sizes
            ]
            recipe.outputs = [weakref.ref(tracked) for tracked in outputs]

    def _has_mostly_small_parts(self, parts: Any, out: Tensor) -> bool:
        """Return whether more than half of a concatenation consists of tensors too small to recompute."""
        if not isinstance(parts, (list, tuple)):
            return False
        limit = self._tracker.smallest_bytes
        return 2 * sum(size for part in parts if (size := part.nbytes) < limit) > out.nbytes

    def record_write(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that overwrites its first argument, and record a recipe of the result."""
        target = args[0]
        recipe = None
        before = self._tracker.find(target)
        if (
            before is not None
            and _survives_write(before, target)
            and self._tracker.is_large(target)
            and not may_overlap(target)  # overlapping elements would be written several times
            and not _has_tensors(kwargs)
        ):
            # Look up all arguments before the write, as another one may share the memory.
            inputs = self._tracker.tracked_args(args)
            recipe = None if inputs is None else _recipe_of(traits.rule, inputs, kwargs, args)
        out = self.write(traits, args, kwargs)
        if recipe is None:
            self._tracker.known.pop(id(target), None)
        else:
            self._tracker.note(out, recipe, 0, out._version + 1)  # torch increments the version after the return
        return out

    def write(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes into tensors, and record the memory that it overwrites."""
        written = traits.written_tensors(args, kwargs)
        for tensor in written:
            self._decider.copy_before_write(memory_id(tensor))
        if traits.writes_inside:
            with count_writes():
                out = traits.run(*args, **kwargs)
        else:
            out = traits.run(*args, **kwargs)
        self._tracker.note_writes(written)
        return out

    def record_batch_norm(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Record a recipe of a batch norm, from its statistics if possible."""
        if not self._tracker.is_large(outputs[0]) or type(outputs[0]) is not Tensor:
            return
        repeat, arguments, own = recipe_of_batch_norm(traits.operation, args, outputs)
        inputs = self._tracker.tracked_args(arguments)
        if inputs is not None:
            recipe = Recipe(repeat, (*inputs, *own), {}, is_view=False)
            self._tracker.note(outputs[0], recipe, 0, outputs[0]._version)

    def record_mask(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Pack a dropout mask into bits, and record a recipe that unpacks it and draws no random numbers."""
        position = MASKS[traits.operation]
        mask = out if position is None else out[position]
        if mask.nbytes >= self._tracker.smallest_bytes and mask.numel() > 0:
            with DisableTorchDispatch():
                bits = bits_of(mask)
            packed = self._tracker.note(bits, None, 0, 0)
            recipe = Recipe(mask_of, (packed, mask.shape, mask.dtype), {}, is_view=False)
            recipe.parts = (bits,)  # the only reference to them
            self._tracker.note(mask, recipe, 0, mask._version + traits.is_writing)


class Traits(NamedTuple):
    """Properties of an operation that a rematerializer needs, looked up once per process.

    Args:
    - `operation`: the operation. This reference keeps it alive, so that no other operation gets its id.
    - `run`: computes its outputs: the operation itself, or a function with the same bits.
    - `rule`: how its outputs are recomputed, if they are.
    - `record`: the method that records its outputs. None if they are recomputed only within a budget, or overwrite its
      first argument.
    - `is_writing`: whether it writes into any tensor.
    - `written`: the positions and names of the arguments that it writes into.
    - `writes_inside`: whether its kernel increments the version counters of the tensors that it writes.
    """

    operation: Operation
    run: Operation
    rule: Rule
    record: Callable[..., None] | None
    is_writing: bool
    written: tuple[tuple[int, str], ...]
    writes_inside: bool

    def written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that the operation writes into."""
        tensors = []
        for position, name in self.written:
            arg = args[position] if position < len(args) else kwargs.get(name)
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(item, Tensor) and item.layout is torch.strided:  # others have no storage
                    tensors.append(item)
        return tensors


_traits: dict[int, Traits] = {}  # by the id of the operation, which hashes faster than the operation


def traits_of(operation: Operation) -> Traits:
    """Return the traits of an operation."""
    if id(operation) in _traits:
        return _traits[id(operation)]
    record: Callable[..., None] | None = None
    if isinstance(operation, HigherOrderOperator):  # its outputs are saved, and it writes into none of its inputs
        traits = Traits(operation, operation, Rule(operation, False, False), None, False, (), False)
        _traits[id(operation)] = traits
        return traits
    rule = rule_of(operation)
    if rule is not None:
        record = None if rule.overwrites else Recorder.record
    elif operation in MASKS:
        record = Recorder.record_mask
    elif operation in BATCH_NORMS:
        record = Recorder.record_batch_norm
    is_listed = rule is not None or record is not None or operation in PRODUCTS
    rule = rule or Rule(operation, is_view=False, overwrites=False)
    written, inside = written_arguments(operation), writes_inside(operation)
    traits = Traits(
        operation,
        FASTER.get(operation, operation) if is_listed else partial(call_in_mode, operation),
        rule,
        record,
        bool(written) or inside,
        written,
        inside,
    )
    _traits[id(operation)] = traits
    return traits


def _is_copy(out: Tensor, x: Tensor) -> bool:
    """Return whether the output of a copying operation can replace its input."""
    return (
        out.stride() == x.stride()
        and out.dtype == x.dtype
        and (out.is_conj(), out.is_neg()) == (x.is_conj(), x.is_neg())
    )


def _without_keywords(
    rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Rule, tuple[Any, ...], dict[str, Any]]:
    """Return an equivalent call with all tensors as positional arguments, as recipes need them."""
    names = [name for name, arg in kwargs.items() if isinstance(arg, Tensor)]
    args = (rule.repeat, names, *[kwargs[name] for name in names], *args)
    others = {name: arg for name, arg in kwargs.items() if name not in names}
    return Rule(call_with_keywords, rule.is_view, overwrites=False), args, others


def _survives_write(tracked: TrackedTensor, target: Tensor) -> bool:
    """Return whether backward can still get the contents of a tensor after a write into its memory."""
    if tracked.saved_tensor is not None:
        return memory_id(tracked.saved_tensor) != memory_id(target)
    return tracked.recipe is not None


def _has_tensors(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs) and any(isinstance(arg, Tensor) for arg in kwargs.values())


def _smaller_inputs(args: Sequence[Any], out: Tensor) -> list[Tensor]:
    """Return the input tensors whose storage is smaller than an output."""
    inputs = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    tensors = [item for item in inputs if isinstance(item, Tensor)]
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes() < out.nbytes]


def _recipe_of(rule: Rule, inputs: Sequence[Any], kwargs: Any, args: Sequence[Any]) -> Recipe:
    """Return the recipe of an operation, fused with the batch norm before it where possible.

    Both terms of a sum must have the same strides.

    Args:
    - `inputs`: tracked tensors and other arguments.
    - `args`: the same arguments with the tensors themselves.
    """
    operation = rule.repeat
    if operation is RELU:
        norm = inputs[0].recipe
        if norm is not None and norm.operation in FUSABLE and inputs[0].readers == 0:
            return Recipe(norm.operation, (*norm.args[:-1], True), {}, is_view=False)
    elif operation is ADD and not kwargs and isinstance(args[1], Tensor):
        a, b = args
        if a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride():
            for tracked, other in (inputs, reversed(inputs)):
                norm = tracked.recipe
                if norm is not None and norm.operation in FUSABLE and tracked.readers == 0:
                    *line, shortcut, is_rectified = norm.args
                    if shortcut is None and not is_rectified:
                        return Recipe(norm.operation, (*line, other, False), {}, is_view=False)
    return Recipe(operation, tuple(inputs), kwargs, rule.is_view)
