"""Queries of the execution context (tracing, compilation, transforms, autocast), and states for recomputation.

In eager mode autograd saves exactly the tensors that an operation saves. This is different under torch.fx,
torch.compile, transforms of `torch.func` and selective checkpoints. Recomputation in backward restores the autocast
state and the random numbers of the forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import set_device_states

from zoo.torch_internals.data import is_same_view, version_of
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
    """Return whether torch.export traces without Dynamo. In torch 2.11 `is_exporting` is True in all Dynamo traces."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def are_gradients_needed(*tensors: Tensor | None) -> bool:
    """Return whether autograd records an operation on these tensors.

    False while torch.export, see above, or torch.jit.trace runs a network. True for the proxies of torch.fx.
    """
    if not torch.is_grad_enabled() or is_exporting() or torch.jit.is_tracing():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return any(not isinstance(tensor, Tensor) or tensor.requires_grad for tensor in given)


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint is active, in forward or in recomputation.

    (`torch.utils.checkpoint.create_selective_checkpoint_contexts`.) Recomputation skips the operations whose results
    were saved. It would lose the in-place updates of a skipped operation, so nothing may be overwritten here.
    """
    if torch.compiler.is_compiling():
        return False
    return num_dispatch_modes() > 0 and any(isinstance(mode, SELECTIVE_CHECKPOINT_MODES) for mode in dispatch_modes())


def can_work_in_place() -> bool:
    """Return whether operations may overwrite tensors that are no longer needed.

    False in compiled code, where the compiler reuses memory and in-place operations are several times slower; and in a
    selective checkpoint, which may have saved the tensor.
    """
    return not torch.compiler.is_compiling() and not in_selective_checkpoint()


def is_eager() -> bool:
    """Return whether operations run in plain eager mode: not compiled, transformed or selectively checkpointed."""
    return can_work_in_place() and not are_transforms_active()


def is_intercepted() -> bool:
    """Return whether the compiler, a dispatch mode or a transform of `torch.func` intercepts each operator."""
    return torch.compiler.is_compiling() or num_dispatch_modes() > 0 or are_transforms_active()


def is_autocast(device_type: str) -> bool:
    """Return whether autocast is enabled for a device type; False for types that it does not support, such as meta."""
    # Autocast supports every device of a compiler, and some versions of torch cannot trace is_autocast_available.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return known and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context that disables autocast; it does nothing for device types without autocast."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()


class Autocast(NamedTuple):
    """The autocast state of a device type: whether it is enabled, and its dtype (None without autocast)."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, x: Tensor) -> Autocast:
        """Return the current autocast state for the device of x."""
        device_type = x.device.type
        if not torch.amp.is_autocast_available(device_type):
            return cls(device_type, False, None)
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context that restores this state."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, enabled=self.enabled)


class RandomState(NamedTuple):
    """The states of the random number generators of the CPU and of one tensor's device."""

    cpu: Tensor
    device_type: str
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> RandomState:
        """Return the current states, for the device of x."""
        # torch.utils.checkpoint.get_device_states searches its arguments for tensors, which takes 20 times as long as
        # this function, and every link of a chain calls it.
        device_type = x.device.type
        if device_type in ("cpu", "meta"):  # meta has no generator
            return cls(torch.get_rng_state(), device_type, [], [])
        device = x.get_device()
        states = [torch.get_device_module(device_type).get_rng_state(device)]
        return cls(torch.get_rng_state(), device_type, [device], states)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.device_type)

    def is_same(self, other: RandomState) -> bool:
        """Return whether the states are equal: no random number was drawn in between."""
        return all(map(torch.equal, [self.cpu, *self.states], [other.cpu, *other.states]))


def rewind_of(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the present state of a random number generator; None for another value."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Return a context that restores the buffers of ``module`` on exit, so that a recomputation updates no statistics.

    Each name gets its tensor back, and each tensor its memory, size and dtype, which `Tensor.resize_`, `Tensor.set_`
    and ``.data`` change. An unchanged buffer is not written, because a graph may have saved it.
    """
    names = [(owner._buffers, dict(owner._buffers)) for owner in module.modules()]
    buffers = [buffer for buffer in module.buffers() if not is_lazy(buffer)]
    before = [(buffer, buffer.detach(), buffer.clone(), version_of(buffer)) for buffer in buffers]
    try:
        yield
    finally:  # torch ends a checkpoint's recomputation early by an exception
        with torch.no_grad():
            for buffer, memory, value, version in before:
                if not is_same_view(buffer, memory):
                    buffer.data = memory
                    buffer.copy_(value)
                elif version_of(buffer) != version or not (buffer.is_meta or torch.equal(buffer, value)):
                    buffer.copy_(value)  # a write to ``.data`` does not count as a version
        for current, original in names:
            current.clear()
            current.update(original)
