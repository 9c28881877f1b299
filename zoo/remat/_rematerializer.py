"""The dispatch mode that records a forward pass, and the hooks by which autograd saves recipes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zoo.remat._budget import Budget
from zoo.remat._cost import CONVOLUTION, LINEAR, flops_of, is_low_rank
from zoo.remat._deciding import Decider
from zoo.remat._frozen import DeferredHandle, FrozenLayers
from zoo.remat._limit import Limiter, existing_bytes
from zoo.remat._operations import Operation, aten
from zoo.remat._recipes import Recipe, SavedHandle, unpack
from zoo.remat._record import GraphRecorder
from zoo.remat._recording import Recorder, traits_of
from zoo.remat._rules import RELU, unread_input
from zoo.remat._tracking import Observer, SavedMemory, Tracker, is_parameter, is_trackable
from zoo.torch_internals.compiler import never_compile
from zoo.torch_internals.data import unpacked
from zoo.torch_internals.dispatch import (
    NO_BACKWARD,
    EagerDispatchMode,
    are_transforms_active,
    around_control_flow,
    before_hooks_are_disabled,
    call_after_backward,
    count_writes,
    current_backward,
    dispatch_modes,
    in_custom_backward,
    push_mode,
    top_saved_tensors_hooks,
    without_dispatch_modes,
)


class ForwardPass:
    """The recorded state of a forward pass until its end.

    Args:
    - `parameters`, `smallest_bytes`: see `Rematerializer`.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[Tensor]],
        smallest_bytes: int | None,
    ) -> None:
        self.saved = SavedMemory(parameters)
        self.tracker = Tracker(self.saved, smallest_bytes)
        self.decider = Decider(self.tracker, self.saved)
        self.recorder = Recorder(self.tracker, self.decider)
        self.frozen = FrozenLayers(self.tracker, self.decider)

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer not overwritten by this pass."""
        return self.saved.is_permanent(tensor) and not self.tracker.has_writes(tensor)

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd holds in place of a saved tensor."""
        handle = self.frozen.pack(tensor) if self.frozen.is_seen else None
        return self.decider.pack(tensor) if handle is None else handle

    def end(self) -> None:
        """Make all pending decisions, and release tensors that backward does not need."""
        self.frozen.finish()
        self.saved.close()
        self.tracker.close()


class Rematerializer(EagerDispatchMode):
    """Saves recipes in place of tensors where that takes less memory.

    Outputs, gradients, running statistics and random numbers are bit-identical to plain training. Backward may run
    inside or outside the context. The context is reusable for one forward pass after another, but not reentrant.

    Backward raises RecipeError if an input of a recipe was overwritten after forward.

    Args:
    - `budget`: as for `zoo.lean`. The first forward pass of a signature is recorded; later ones follow a plan.
    - `smallest_bytes`: tensors of fewer bytes are saved. None: 4 KiB.
    - `parameters`: parameters and buffers. They stay alive anyway and are free inputs of recipes. An iterator is
      consumed only if necessary. Every `nn.Parameter` counts as one of them.
    - `existing`: tensors that exist before the pass, such as the inputs of the network. A budget in bytes counts them.
    - `signature`: equal for forward passes that compute tensors of the same sizes.
    """

    def __init__(
        self,
        budget: Budget | float | int | str | None = None,
        *,
        smallest_bytes: int | None = None,
        parameters: Iterable[Tensor] = (),
        existing: Sequence[Tensor] = (),
        signature: Any = None,
    ) -> None:
        super().__init__()
        self._budget = Budget.parse(budget)
        self._budget.limiter = self._limiter = self._budget.limiter or Limiter(self._budget)
        self._smallest_bytes = smallest_bytes
        self._parameters = cache(lambda: [each for each in parameters if is_trackable(each)])
        self._existing, self._signature = existing, signature

    @never_compile
    def __enter__(self) -> Rematerializer:
        """Start recording."""
        self._begin()
        with ExitStack() as contexts:  # unwinds after an interrupt between two entries
            contexts.enter_context(self._hooks)
            super().__enter__()
            contexts.push(super().__exit__)
            self._contexts = contexts.pop_all()
        return self

    def _begin(self) -> None:
        """Create the recorded state."""
        self._pass = ForwardPass(self._parameters, self._smallest_bytes)
        self._pass.tracker.observer = self._observer()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def _observer(self) -> Observer | None:
        """Return an observer for the new pass."""
        existing = partial(existing_bytes, self._parameters, self._existing)
        return self._limiter.begin(self._signature, self._pass.is_constant, existing)

    @never_compile
    def __exit__(self, *error: Any) -> None:
        """Stop recording. Tensors that backward needs stay alive."""
        self._contexts.__exit__(*error)
        del self._contexts
        self._end(is_whole=error[0] is None)

    def _end(self, is_whole: bool = True) -> None:
        """Make all pending decisions, and release the recorded state.

        Args:
        - `is_whole`: False if the pass ended with an exception.
        """
        ended, observer = self._pass, self._pass.tracker.observer
        ended.end()
        if isinstance(observer, GraphRecorder):
            observer.graph.has_frozen = ended.frozen.is_seen
            observer.graph.smallest_bytes = ended.tracker.smallest_bytes
        self._limiter.end(self._signature, observer, is_whole, ended.saved.bytes)
        del self._hooks, self._pass  # they refer to self

    @never_compile
    def __torch_dispatch__(
        self, operation: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record recipes of its outputs."""
        kwargs = kwargs or {}
        traits, forward = traits_of(operation), self._pass
        recorder, frozen = forward.recorder, forward.frozen
        if operation is CONVOLUTION and not args[1].requires_grad:
            frozen.is_seen = True
        has_grad = torch.is_grad_enabled()
        saves = frozen.is_seen and has_grad and _innermost() is self
        if frozen.deferred:
            with count_writes():  # so that the saved tensor shares the version counter of the original
                frozen.settle(unread_input(operation, args) if saves else None)
        # Transforms of torch.func run operations on wrapped tensors.
        is_recorded = has_grad and not are_transforms_active()
        if not traits.is_writing:
            out = traits.run(*args, **kwargs)
        elif is_recorded and traits.rule.overwrites:
            out = recorder.record_write(traits, args, kwargs)
        else:
            out = recorder.write(traits, args, kwargs)
        if is_recorded:
            if traits.record is not None:
                traits.record(recorder, traits, args, kwargs, out)
            elif self._budget.has_limit or operation in LINEAR:
                flops = flops_of(operation, args, out)
                if flops is not None and (self._budget.has_limit or is_low_rank(operation, args)):
                    if forward.tracker.observer is not None:
                        forward.tracker.observer.note_flops(flops)
                    recorder.record(traits, args, kwargs, out)
        if frozen.is_seen:
            frozen.note_relu(out if saves and traits.rule.repeat is RELU else None)
        return out

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        return self._pass.pack(tensor)


class _OfBackward(Rematerializer):
    """Records backward passes with ``create_graph=True``, so that their graphs save recipes too.

    Its context is entered when a node of the first graph reads a saved tensor. The engine restores the dispatch modes
    and the hooks of the thread after each node.
    """

    _of_thread = threading.local()

    @classmethod
    def of_this_pass(cls) -> _OfBackward:
        """Return the rematerializer of this thread for the running backward pass. The engine ends it."""
        task = current_backward()
        if getattr(cls._of_thread, "task", None) != task:
            found = cls()
            found._begin()
            found._pass.saved.bytes = sys.maxsize  # unknown: the first graph has saved tensors too
            cls._of_thread.task, cls._of_thread.rematerializer = task, found
            call_after_backward(found._end)
        rematerializer: _OfBackward = cls._of_thread.rematerializer
        return rematerializer

    def _observer(self) -> Observer | None:
        return None

    def join(self, tensor: Tensor, packed: Any) -> None:
        """Enter the context for the running node, and track the tensor that it has just read."""
        hooks = top_saved_tensors_hooks(True)
        if hooks is None:
            self._hooks.__enter__()
            push_mode(self)
        elif _innermost() is not self:
            return
        if not is_trackable(tensor):
            return
        if isinstance(packed, SavedHandle):
            self._pass.tracker.note_unpacked(tensor, Recipe(aten.alias.default, (packed.tracked,), {}, is_view=True))
        elif isinstance(packed, DeferredHandle):  # saved by a frozen layer, and a new tensor each time
            self._pass.tracker.note_unpacked(tensor, Recipe(packed.unpack, (), {}, is_view=False))
        else:
            self._pass.saved.add_saved(tensor)


@never_compile
def _unpack(packed: Any) -> Tensor:
    """Return the saved tensor for the object that autograd holds in its place."""
    tensor = unpack(packed)
    if torch.is_grad_enabled() and current_backward() != NO_BACKWARD and not are_transforms_active():
        _OfBackward.of_this_pass().join(tensor, packed)
    if is_parameter(tensor) and tensor.requires_grad and tensor.__dict__ and in_custom_backward():
        return unpacked(tensor) if is_trackable(tensor) else tensor
    return tensor


def _innermost() -> Rematerializer | None:
    """Return the rematerializer with the innermost hooks; None if these belong to something else."""
    hooks = top_saved_tensors_hooks(False)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, Rematerializer) else None


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Removes the saved-tensor hooks of the innermost rematerializer. torch.func refuses to run under hooks."""
    rematerializer = _innermost()
    if rematerializer is None:
        yield
        return
    rematerializer._hooks.__exit__()
    try:
        yield
    finally:
        rematerializer._hooks.__enter__()


@contextmanager
def _without_recording() -> Iterator[None]:
    """Disables the dispatch modes and hooks of this package, unless other dispatch modes are active."""
    modes = dispatch_modes()
    if not modes or not all(type(mode).__module__.startswith("zoo.") for mode in modes):
        yield
        return
    with _without_hooks(), without_dispatch_modes():
        yield


before_hooks_are_disabled(_without_hooks)
around_control_flow(_without_recording)
