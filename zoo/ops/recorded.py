"""Who decides what is kept for backward: autograd alone, or a compiler, a transform or a selective checkpoint."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# Private names: where a version of torch has them no longer, every dispatch mode is taken for one of them, to be safe.
_SELECTIVE = tuple(
    getattr(torch.utils.checkpoint, name, TorchDispatchMode)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
)


def is_transformed() -> bool:
    """Return whether this runs inside a transform of `torch.func`, which knows neither checkpoints nor saved hooks."""
    return torch._C._are_functorch_transforms_active()


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint records this, or repeats it.

    (`torch.utils.checkpoint.create_selective_checkpoint_contexts`.)  It takes the results of the operations that it
    saves for the repetition, in which these operations do not run: what one of them has overwritten then is not.
    Nothing may be overwritten here.
    """
    if torch.compiler.is_compiling():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def is_recorded() -> bool:
    """Return whether autograd keeps what is saved here, and keeps it as it is told."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and not in_selective_checkpoint()
    )


def is_autocast(device_type: str) -> bool:
    """Return whether autocast casts on a device, also for devices that it does not know, such as meta."""
    # Compilers know all their devices, and not every version of torch's traces the first question.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return known and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast casts nothing, also on devices that it does not know."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()
