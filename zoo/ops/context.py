"""Queries of the execution context: tracing, compilation, transforms, autocast.

In eager mode, autograd saves exactly the tensors that an operation asks it to save. This does not hold under torch.fx,
torch.compile, transforms of `torch.func` and selective checkpoints.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zoo.torch_internals.dispatch import (
    SELECTIVE_CHECKPOINT_MODES,
    are_transforms_active,
    dispatch_modes,
    num_dispatch_modes,
)


def is_fx_proxy(x: Any) -> bool:
    """Return whether x is a proxy of torch.fx, which has no shape, dtype or values."""
    return not isinstance(x, Tensor)


def is_exporting() -> bool:
    """Return whether torch.export traces without Dynamo. torch 2.11's `is_exporting` is True in all Dynamo traces."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def are_gradients_needed(*tensors: Tensor | None) -> bool:
    """Return whether autograd records an operation on these tensors.

    False while torch.export (see `is_exporting`) or torch.jit.trace runs a network. True for proxies of torch.fx.
    """
    if not torch.is_grad_enabled() or is_exporting() or torch.jit.is_tracing():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return any(not isinstance(tensor, Tensor) or tensor.requires_grad for tensor in given)


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint is active, in forward or in recomputation.

    See `torch.utils.checkpoint.create_selective_checkpoint_contexts`. Recomputation skips operations whose results were
    saved, and with them their in-place updates, so nothing may be overwritten in such a checkpoint.
    """
    if torch.compiler.is_compiling():
        return False
    return num_dispatch_modes() > 0 and any(isinstance(mode, SELECTIVE_CHECKPOINT_MODES) for mode in dispatch_modes())


def can_work_in_place() -> bool:
    """Return whether operations may overwrite tensors that are no longer needed.

    False in compiled code, where the compiler reuses memory and in-place operations are several times slower, and in a
    selective checkpoint, because it may have saved the tensor.
    """
    return not torch.compiler.is_compiling() and not in_selective_checkpoint()


def is_eager() -> bool:
    """Return whether operations run in plain eager mode: not compiled, transformed or selectively checkpointed."""
    return can_work_in_place() and not are_transforms_active()


def is_intercepted() -> bool:
    """Return whether the compiler, a dispatch mode or a transform of `torch.func` intercepts each operator."""
    return torch.compiler.is_compiling() or num_dispatch_modes() > 0 or are_transforms_active()


def is_autocast(device_type: str) -> bool:
    """Return whether autocast is enabled for a device type; False for unsupported types, such as meta."""
    # Some versions of torch cannot trace is_autocast_available; autocast supports all devices that torch.compile does.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return known and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disables autocast within the block; does nothing for device types without autocast."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()
