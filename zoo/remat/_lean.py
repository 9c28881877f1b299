"""`zoo.lean`: rematerialization for any module, without changing its layers."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.remat import Rematerializer
from zoo.remat._budget import Budget
from zoo.remat._limit import watch_optimizers
from zoo.torch_internals.compiler import has_compiled_part, run_while_compiling
from zoo.torch_internals.data import tensors_of, tree_leaves
from zoo.torch_internals.dispatch import are_transforms_active, top_saved_tensors_hooks

Module = TypeVar("Module", bound=nn.Module)

_BUDGET = "_zoo_lean"  # key in the __dict__ of a lean module
# Names of methods that compute features, beside `forward`. Other methods may generate or train.
_METHODS = re.compile(r"forward_\w+|(en|de)code(_\w+)?|extract_\w+|get_(intermediate_layers|\w+_features)")


def lean(
    module: Module,
    budget: float | int | str | None = None,
    *,
    enabled: bool = True,
) -> Module:
    """Make a module train in about half the activation memory, bit for bit, and return it.

    Calls of the module then run in a `zoo.remat.Rematerializer`: where autograd would save the output of a cheap
    operation for backward, a recipe for recomputing it is saved instead. Outputs, gradients, running statistics and
    random numbers are bit-identical to plain training. Parameters, state dict, hooks and pickling do not
    change. The class of the module becomes a subclass of the same name. Methods that compute features also run in a
    rematerializer: ``forward_*``, ``extract_*``, ``encode``, ``encode_*``, ``decode``, ``decode_*``,
    ``get_intermediate_layers`` and ``get_*_features``.

    A call runs as in plain training if gradients are disabled, in transforms of `torch.func`, and inside another lean
    module, a checkpoint or other saved-tensor hooks. The same holds in and around modules compiled by torch.compile,
    where the first call warns with `StepsAside`. Without a budget, small calls run as in plain training from their
    second step on: calls in which lean training saves less than 8 KiB per tensor that they compute.

    Backward raises RecipeError if a tensor that it needs, such as the input of the network or a parameter, was
    overwritten between forward and backward.

    Args:
    - `module`: a network or a part of one, changed in place. A second call replaces the budget.
    - `budget`: limit within which as little as possible is recomputed, convolutions and matrix products included. None:
      recompute cheap operations only. 0.4 or "40%": the bytes saved and recomputed at any time of backward, as a
      fraction of the bytes that plain training saves. "8GB" or an int: the peak memory of a training step in bytes,
      including parameters, gradients and optimizer state. The first step saves as little as possible. From the third
      step on, steps stay within the limit and take as little time as possible.
    - `enabled`: False makes the module plain again.

    Raises ConfigError for an invalid budget, and TypeError for anything but a module. A call of the module raises
    ConfigError if no training step stays within a limit in bytes, and warns with `BelowFloor` if a fraction cannot be
    met.
    """
    if not isinstance(module, nn.Module):
        name = module if isinstance(module, str) else "resnet50"
        raise TypeError(
            f"zoo.lean takes a torch.nn.Module, not {type(module).__name__} {module!r:.80}; build the network first, "
            f"as zoo.get({name!r}) does"
        )
    parsed = Budget.parse(budget)
    if not enabled:
        module.__dict__.pop(_BUDGET, None)
        if _is_lean_class(type(module)):
            module.__class__ = type(module).__bases__[1]
        return module
    watch_optimizers()  # a limit in bytes that is set later counts their state
    return _make_lean(module, parsed)


def is_lean(module: nn.Module) -> bool:
    """Return whether `lean` was called for this module itself."""
    return isinstance(module, _Lean) and _BUDGET in module.__dict__


def make_plain(module: nn.Module) -> nn.Module:
    """Undo `lean` for a module and all its parts, in place; return the module."""
    for part in module.modules():
        if is_lean(part):
            lean(part, enabled=False)
    return module


class _Lean:
    """First base class of a lean module: runs its calls in a rematerializer.

    Forward hooks cannot do this: torch skips them after a KeyboardInterrupt, which would leave the mode active.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, in a rematerializer unless something else handles saved tensors."""
        call = super().__call__  # type: ignore[misc]
        if torch.compiler.is_compiling():
            if not torch.compiler.is_exporting():
                _warn_that_it_steps_aside()
            return call(*args, **kwargs)
        with _rematerializer_of(self, args, kwargs):
            return call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a lean copy, made by the original class."""
        if not _is_lean_class(type(self)):  # a subclass of the lean class, as created by parametrizations
            other = memo[id(self)] = type(self).__new__(type(self))
            other.__dict__ = copy.deepcopy(self.__dict__, memo)
            return other
        budget = copy.deepcopy(self.__dict__.get(_BUDGET), memo)
        with _as_original(self):
            other = copy.deepcopy(self, memo)
        return other if budget is None else _make_lean(other, budget)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to unpickle a module of the original class and make it lean."""
        with _as_original(self):
            function, arguments, *rest = self.__reduce_ex__(protocol)
        return _restore, (function, arguments, self.__dict__.get(_BUDGET)), *rest

    def __prepare_scriptable__(self) -> Any:
        """Raise ConfigError: `torch.jit.script` would compile methods that only Python can run."""
        raise ConfigError(
            "torch.jit.script does not support lean modules",
            type(self).__name__,
            "script the plain network, zoo.lean(model, enabled=False)",
        )

    def recompile(self) -> Any:
        """Recompile a `torch.fx.GraphModule`, which sets methods of its class."""
        with _as_original(self):
            return self.recompile()


def _is_lean_class(cls: type) -> bool:
    return cls.__bases__[:1] == (_Lean,)


@functools.lru_cache(maxsize=256)  # bounded: each GraphModule has its own class
def _lean_class(original: type) -> type:
    """Return the lean subclass of a module's class. It has the same name, since users print names."""
    names = {name: original.__dict__.get(name) for name in ("__module__", "__doc__")}
    found = {name: inspect.getattr_static(original, name) for name in dir(original) if _METHODS.fullmatch(name)}
    methods = {name: _lean_method(method) for name, method in found.items() if inspect.isfunction(method)}
    return type(original.__name__, (_Lean, original), {**methods, **names, "__qualname__": original.__qualname__})


def _lean_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs in a rematerializer unless it is part of a call of the module."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _context_of_method(self, method, args, kwargs):
            return method(self, *args, **kwargs)

    return run


def _context_of_method(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    if torch.compiler.is_compiling():
        if _BUDGET in module.__dict__ and not torch.compiler.is_exporting():
            _warn_that_it_steps_aside()
        return nullcontext()
    return _rematerializer_of(module, args, kwargs)


@contextmanager
def _as_original(module: Any) -> Iterator[None]:
    """Restores the original class of a lean module within the block."""
    cls = type(module)
    module.__class__ = cls.__bases__[1]
    try:
        yield
    finally:
        module.__class__ = cls


def _make_lean(module: Any, budget: Budget) -> Any:
    module.__dict__[_BUDGET] = budget
    original: Any = type(module)
    if not isinstance(module, _Lean):
        module.__class__ = _lean_class(original)
    return module


def _restore(function: Callable[..., Any], arguments: tuple[Any, ...], budget: Budget | None) -> Any:
    """Return a new lean module without state, or a plain one if ``budget`` is None. The unpickler sets the state."""
    module = function(*arguments)
    return module if budget is None else _make_lean(module, budget)


def _rematerializer_of(module: Any, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    budget: Budget | None = module.__dict__.get(_BUDGET)
    if budget is None or not _applies():
        return nullcontext()
    context = context_of_call(module, budget, args, kwargs)
    if not isinstance(context, nullcontext) and has_compiled_part(module):
        _warn_that_it_steps_aside()
        return nullcontext()
    return context


def context_of_call(module: nn.Module, budget: Budget, args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    """Return the context of a lean call. It does nothing if the plan of the call recomputes nothing.

    The caller checks that `why_plain` gives no reason against it.
    """
    signature = module.training, *_kinds_of(args, kwargs)
    if not budget.has_limit and budget.limiter is not None and budget.limiter.runs_plainly(signature):
        return nullcontext()
    own = chain(module.parameters(), module.buffers())  # consumed only if necessary
    if not budget.has_limit:
        return Rematerializer(budget, parameters=own, signature=signature)
    tensors, inputs = list(own), tensors_of((args, kwargs))
    return Rematerializer(
        budget,
        parameters=tensors,
        existing=inputs,
        signature=(signature, _state_of(tensors)),
    )


def _kinds_of(args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the properties of inputs that determine which tensors a call computes: shapes, types and switches.

    Switches are booleans, and arguments that are strings. Numbers, and strings nested in arguments, may differ in each
    call, like a step number or file names. Most of them change no sizes.
    """
    yield torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, str):
            yield argument
            continue
        for leaf in tree_leaves(argument):
            if isinstance(leaf, Tensor):
                yield leaf.numel() if leaf.is_nested else leaf.shape, leaf.dtype, leaf.requires_grad
            else:
                yield leaf if isinstance(leaf, bool) else type(leaf)


def _state_of(own: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the state of a module that determines what a call saves: trained parameters, gradients and autocast."""
    trained = tuple(tensor.requires_grad for tensor in own)
    accumulates = any(tensor.grad is not None for tensor in own)
    device = own[0].device.type if own else "cpu"
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return trained, accumulates, has_autocast and torch.get_autocast_dtype(device)


def why_plain(module: nn.Module) -> str:
    """Return the reason why training calls of a module run plainly; "" if they run lean."""
    if has_compiled_part(module):  # a dispatch mode would run such a part uncompiled
        return "torch.compile compiles it or a part of it"
    return "" if _applies() else "something else handles the tensors that autograd saves, such as a checkpoint"


def _applies() -> bool:
    """Return whether autograd records, and nothing else handles its saved tensors."""
    return (
        torch.is_grad_enabled()
        and not are_transforms_active()
        and not torch.jit.is_tracing()
        and top_saved_tensors_hooks(True) is None
    )


class StepsAside(UserWarning):
    """`zoo.lean` has no effect, because the module is compiled or contains a compiled module."""


_has_warned = False


@run_while_compiling
def _warn_that_it_steps_aside() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "zoo.lean has no effect in or around modules compiled by torch.compile; compile the plain network with "
            "torch.compile(model, options=zoo.remat.inductor_options()), which saves as little",
            StepsAside,
            stacklevel=2,
        )
