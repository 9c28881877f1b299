"""The context of an operation: what decides which tensors backward keeps, the autocast dtype, the random numbers.

Autograd alone decides what is kept, unless torch.fx traces, torch.compile compiles, a transform of `torch.func` is
active, or a selective checkpoint records. A recomputation in backward takes the autocast state and the random numbers
of the forward pass with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils.checkpoint import set_device_states

from zoo.torch_internals import (
    SELECTIVE_CHECKPOINT_MODES,
    are_transforms_active,
    dispatch_modes,
    num_dispatch_modes,
    num_function_modes,
)


def is_fx_proxy(x: Any) -> bool:
    """Return whether x only stands for a tensor that torch.fx traces; it has no shape, dtype or values."""
    return not isinstance(x, Tensor)


def is_transformed() -> bool:
    """Return whether this runs inside a transform of `torch.func`, which knows neither checkpoints nor saved hooks."""
    return are_transforms_active()


def is_exporting() -> bool:
    """Return whether torch.export traces this by itself. Dynamo of torch 2.11 says so of whatever it traces."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def in_selective_checkpoint() -> bool:
    """Return whether a selective checkpoint records this, or repeats it.

    (`torch.utils.checkpoint.create_selective_checkpoint_contexts`.) Its repetition skips the operations whose results
    it saved. An in-place update made by a skipped operation would be lost, so nothing may be overwritten here.
    """
    if torch.compiler.is_compiling():
        return False
    return num_dispatch_modes() > 0 and any(isinstance(mode, SELECTIVE_CHECKPOINT_MODES) for mode in dispatch_modes())


def can_work_in_place() -> bool:
    """Return whether operations may overwrite tensors here that are not needed any more.

    Compilers reuse the memory by themselves, and write several times slower code for the forms in place; a selective
    checkpoint may have saved the tensor.
    """
    return not torch.compiler.is_compiling() and not in_selective_checkpoint()


def is_eager() -> bool:
    """Return whether operations run one by one as they are written: nothing compiles, transforms or records them."""
    return can_work_in_place() and not is_transformed()


def is_unwatched(x: Tensor) -> bool:
    """Return whether nothing but autograd looks at operations on x, which lies on a CPU or CUDA device.

    Then a function may do the work of an operator without torch's dispatcher. Not so where a subclass of tensors, a
    mode, a transform, a trace or the compiler waits for the operator, on other devices, and for a view that negates.
    """
    return (
        not torch.compiler.is_compiling()  # first, as it knows not all that follows
        and (type(x) is Tensor or type(x) is Parameter)
        and (x.is_cpu or x.is_cuda)
        and not x.is_neg()
        and num_dispatch_modes() == 0
        and num_function_modes() == 0
        and not is_transformed()
        and not torch.jit.is_tracing()
    )


def is_recorded() -> bool:
    """Return whether autograd records here, and keeps exactly the tensors that operations save."""
    return torch.is_grad_enabled() and is_eager()


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `once_differentiable` of a backward, called only where a second derivative could be taken.

    Elsewhere the decorator changes nothing, and takes the host as long as a small kernel.
    """
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


def is_autocast(device_type: str) -> bool:
    """Return whether autocast casts on a device, also for devices that it does not know, such as meta."""
    # Compilers know all their devices, and not every version of torch can trace is_autocast_available.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return known and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast casts nothing, also on devices that it does not know."""
    known = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if known else nullcontext()


class Autocast(NamedTuple):
    """Whether autocast casts on a device, and to which dtype."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, x: Tensor) -> Autocast:
        """Return the present autocast state of the device of x."""
        device_type = x.device.type
        if not torch.amp.is_autocast_available(device_type):
            return cls(device_type, False, None)
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which it holds again."""
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
        """Return the present states, for the device of x."""
        # torch.utils.checkpoint.get_device_states searches its arguments for tensors, which takes 20 times as long as
        # all of this, at every link of a chain.
        device_type = x.device.type
        if device_type in ("cpu", "meta"):  # the one is always there, the other has no random numbers
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
        """Return whether no random number was drawn between the two."""
        return all(map(torch.equal, [self.cpu, *self.states], [other.cpu, *other.states]))


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Context that restores the buffers of ``module`` at its end, so that a repeated forward updates no statistics."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:  # torch leaves a checkpoint's recomputation by an exception once it has all tensors that it needs
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
