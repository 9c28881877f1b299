"""`lean`: let any network keep recipes in place of activations, without changing its layers."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from zoo.ops.context import is_transformed
from zoo.remat import Recording
from zoo.remat.budget import Budget
from zoo.torch_internals import forward_hooks, is_compiled, run_while_compiling, top_saved_tensors_hooks

Module = TypeVar("Module", bound=nn.Module)

_SETTINGS = "_zoo_lean"  # the name under which a lean module holds its settings


def lean(
    module: Module, budget: float | int | str | None = None, *, exact: bool = True, enabled: bool = True
) -> Module:
    """Let a module's training hold about half the memory, with the same bits; returns the module itself.

    From now on calls of the module run in a `zoo.remat.Recording`: where autograd would keep the output of a cheap
    operation for backward, it keeps how to compute it again. Outputs, gradients, running statistics and random numbers
    are the same bits; parameters, state dict, hooks and pickling are as before. The module's class becomes a subclass
    with the same name. Without gradients, in a transform of `torch.func`, and inside another lean module, a checkpoint
    or other hooks for saved tensors, nothing happens; nor does it inside of a module that torch.compile compiles, or
    around one, which a StepsAside warning tells once.

    Backward raises RecipeError if a tensor that it needs, such as the network's input or a parameter, was overwritten
    between forward and backward.

    Args:
    - `module`: a network or a part of one, changed in place. A second call replaces the budget.
    - `budget`: what the recomputation of convolutions and matrix products may cost. None: they are not computed again.
      An int: the bytes that the forward pass may leave held; a float below 1: the share of those of plain training;
      "40 FLOP/B": all are computed again whose outputs cost up to 40 floating-point operations for each byte. For
      bytes and shares, the first forward passes are measured and the cheapest convolutions chosen, so that the budget
      is met from the second or third pass on, if it can be.
    - `exact`: False lets batch norms in training run as one kernel with the ReLU, SiLU or hardswish that directly
      follows them, in forward, in recomputation and in backward, where this package has compiled ones (float32, float64
      and half precision on the CPU). A step takes less time, mostly with SiLU. Outputs, gradients and running
      statistics are then equal to those of plain training to rounding, and the gradients of norms cannot be
      differentiated again.
    - `enabled`: False undoes it.

    Raises ConfigError for a budget that is none of these, and TypeError for anything but a module.
    """
    if not isinstance(module, nn.Module):
        name = module if isinstance(module, str) else "resnet50"
        raise TypeError(
            f"zoo.lean takes a torch.nn.Module, not {type(module).__name__} {module!r:.80}; build the network first, "
            f"as zoo.get({name!r}) does"
        )
    if not enabled:
        module.__dict__.pop(_SETTINGS, None)
        if _is_lean_class(type(module)):
            module.__class__ = type(module).__bases__[1]
        return module
    return _make_lean(module, _Settings(Budget.parse(budget), exact))


def is_lean(module: nn.Module) -> bool:
    """Return whether `lean` was called for this module itself."""
    return isinstance(module, _Lean) and _SETTINGS in module.__dict__


class _Settings(NamedTuple):
    """The arguments of `lean`."""

    budget: Budget
    exact: bool


class _Lean:
    """Records the calls of a module: the first base of its class while it is lean.

    Forward hooks cannot do this: torch calls none after a KeyboardInterrupt, and the recording would stay active.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, recorded unless something else decides what autograd keeps."""
        if torch.compiler.is_compiling():
            _tell_that_it_steps_aside()
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with _recording_of(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a lean copy, made as the original class copies itself."""
        if not _is_lean_class(type(self)):  # a subclass of the lean class, as parametrizations make
            other = memo[id(self)] = type(self).__new__(type(self))
            other.__dict__ = copy.deepcopy(self.__dict__, memo)
            return other
        settings = copy.deepcopy(self.__dict__[_SETTINGS], memo)
        with _as_original(self):
            other = copy.deepcopy(self, memo)
        return _make_lean(other, settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how pickles make a module of the original class, and make it lean."""
        with _as_original(self):
            function, arguments, *rest = self.__reduce_ex__(protocol)
        return _restore, (function, arguments, self.__dict__[_SETTINGS]), *rest

    def recompile(self) -> Any:
        """Write the code of a `torch.fx.GraphModule` again, which changes the methods of its class."""
        with _as_original(self):
            return self.recompile()


def _is_lean_class(cls: type) -> bool:
    return cls.__bases__[:1] == (_Lean,)


@functools.lru_cache(maxsize=256)  # each GraphModule has a class of its own
def _lean_class(original: type) -> type:
    """Return the subclass of a module's class that records its calls. It has the same name, as users print names."""
    names = {name: original.__dict__.get(name) for name in ("__module__", "__doc__")}
    return type(original.__name__, (_Lean, original), {**names, "__qualname__": original.__qualname__})


@contextmanager
def _as_original(module: Any) -> Iterator[None]:
    """Return a context in which a lean module is of its original class."""
    cls = type(module)
    module.__class__ = cls.__bases__[1]
    try:
        yield
    finally:
        module.__class__ = cls


def _make_lean(module: Any, settings: _Settings) -> Any:
    module.__dict__[_SETTINGS] = settings
    original: Any = type(module)
    if not isinstance(module, _Lean):
        module.__class__ = _lean_class(original)
    return module


def _restore(function: Callable[..., Any], arguments: tuple[Any, ...], settings: _Settings) -> Any:
    """Return a new lean module, whose state is still to be set."""
    return _make_lean(function(*arguments), settings)


def _recording_of(module: Any) -> AbstractContextManager[Any]:
    settings: _Settings | None = module.__dict__.get(_SETTINGS)
    if settings is None or not torch.is_grad_enabled() or is_transformed() or torch.jit.is_tracing() or _others_save():
        return nullcontext()
    if any(map(is_compiled, module.modules())):  # in a recording such a part would run uncompiled
        _tell_that_it_steps_aside()
        return nullcontext()
    own = [*module.parameters(), *module.buffers()]
    is_hooked = not settings.exact and any(forward_hooks(each) for each in module.modules())
    return Recording(settings.budget, parameters=own, exact=settings.exact, is_hooked=is_hooked)


class StepsAside(UserWarning):
    """A lean module is compiled, or has a compiled part, so that it is not lean."""


_was_told = False


@run_while_compiling
def _tell_that_it_steps_aside() -> None:
    global _was_told
    if not _was_told:
        _was_told = True
        warnings.warn(
            "zoo.lean does nothing inside of modules that torch.compile compiles, or around them; experiments limit "
            "what compiled networks keep for backward with training.activation_memory_budget",
            StepsAside,
            stacklevel=2,
        )


def _others_save() -> bool:
    """Return whether a recording, a checkpoint or others have hooks for saved tensors, whose place ours would take."""
    return top_saved_tensors_hooks(True) is not None
