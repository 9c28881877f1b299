"""`lean`: let any network keep recipes in place of activations, without changing its layers."""

from __future__ import annotations

import threading
import warnings
from typing import Any, TypeVar

import torch
from torch import nn

from zoo.ops.context import is_transformed
from zoo.ops.lean import Recording
from zoo.ops.lean.budget import Budget

Module = TypeVar("Module", bound=nn.Module)

_active = threading.local()  # .recordings: those of the modules whose forward runs in this thread, the outermost first


def lean(
    module: Module, budget: float | int | str | None = None, *, exact: bool = True, enabled: bool = True
) -> Module:
    """Let a module's training hold about half the memory, with the same bits; returns the module itself.

    From now on its forward pass runs in a `zoo.ops.lean.Recording`: where autograd would keep the output of a cheap
    operation for backward, it keeps how to compute it again. Outputs, gradients, running statistics and random numbers
    are the same bits; parameters, state dict, hooks and pickling are as before. Without gradients, in a transform of
    `torch.func`, and inside another lean module, a checkpoint or other hooks for saved tensors, nothing happens; nor
    does it inside of a module that torch.compile compiles, or around one, which a StepsAside warning tells once.

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

    Raises ConfigError for a budget that is none of these.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, (_Begin, _End))]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
    if enabled:
        module.register_forward_pre_hook(_Begin(Budget.parse(budget), exact), prepend=True)
        module.register_forward_hook(_End(), always_call=True)
    return module


def is_lean(module: nn.Module) -> bool:
    """Return whether `lean` was called for this module itself."""
    return any(isinstance(hook, _Begin) for hook in module._forward_pre_hooks.values())


class StepsAside(UserWarning):
    """A lean module is compiled, or has a compiled part, so that it is not lean."""


_was_told = False


def _tell_that_it_steps_aside() -> None:
    global _was_told
    if not _was_told:
        _was_told = True
        warnings.warn(
            "zoo.lean does nothing inside of modules that torch.compile compiles, or around them; the compiler has a "
            "budget of its own, torch._functorch.config.activation_memory_budget, which experiments set with "
            "training.activation_memory_budget",
            StepsAside,
            stacklevel=2,
        )


# torch.compile calls it, and does not trace it. (torch.compiler.assume_constant_result sets this, and imports much.)
_tell_that_it_steps_aside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile compiles a module or a part of it; in a recording that part would run uncompiled."""
    return any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in module.modules())


def _others_save() -> bool:
    """Return whether a recording, a checkpoint or others have hooks for saved tensors, whose place ours would take."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Begin:
    """Begins to record, before a module's forward pass."""

    def __init__(self, budget: Budget, exact: bool) -> None:
        self.budget, self.exact = budget, exact

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            _tell_that_it_steps_aside()
            return
        recordings = _active.__dict__.setdefault("recordings", [])
        recording = None
        is_plain = not torch.is_grad_enabled() or is_transformed() or torch.jit.is_tracing() or _others_save()
        if not is_plain and _is_compiled(module):
            _tell_that_it_steps_aside()
        elif not is_plain:
            recording = Recording(self.budget, parameters=[*module.parameters(), *module.buffers()], exact=self.exact)
            recording.__enter__()
        recordings.append(recording)


class _End:
    """Stops recording, after a module's forward pass or an exception in it."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and _active.recordings:
            recording = _active.recordings.pop()
            if recording is not None:
                recording.__exit__(None, None, None)
