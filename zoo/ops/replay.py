"""The random numbers and the autocast of a forward pass, for a recomputation in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class RandomState(NamedTuple):
    """The states of the generators of the CPU and of one tensor's device."""

    cpu: Tensor
    device_type: str
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> RandomState:
        """Return the present states, for x's device."""
        return cls(torch.get_rng_state(), x.device.type, *get_device_states(x))

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.device_type)

    def is_same(self, other: RandomState) -> bool:
        """Return whether no random number was drawn between the two."""
        return all(map(torch.equal, [self.cpu, *self.states], [other.cpu, *other.states]))


class Autocast(NamedTuple):
    """Whether autocast casts on a device, and to what."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, x: Tensor) -> Autocast:
        """Return what holds at present for x's device."""
        kind = x.device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, False, None)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which it holds."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, enabled=self.enabled)
