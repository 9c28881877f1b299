"""What convolutions take besides their results while they run: a sizeable part of a step that holds little.

No shape tells: on the CPU it is copies in layouts that suit the processor, on a GPU a workspace.  So each distinct
convolution is run on a few images; from two batches follows any other, as all that grows does so in a straight line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.benchmark.held import Change, measure_peak
from zoo.benchmark.storages import StorageLog, storages_of

# The arguments that are as many as the images.
CONVOLUTIONS = {torch.ops.aten.convolution.default: (0,), torch.ops.aten.convolution_backward.default: (0, 1)}
BATCHES = (4, 8)  # with fewer the rearranged weights may be the larger part


class Scratch:
    """The scratch memory of convolutions on ``device``, each of them measured once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, list[int]] = {}

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return what a call takes at its peak, its results left out; ``args`` may be without numbers."""
        batched = CONVOLUTIONS[func]
        key = str([_described(arg, index in batched) for index, arg in enumerate(args)]) + str(func)
        if key not in self._known:
            self._known[key] = [self._measure(func, args, kwargs, batch) for batch in BATCHES]
        first, second = self._known[key]
        per_image = (second - first) / (BATCHES[1] - BATCHES[0])
        return max(0, int(first + per_image * (args[0].shape[0] - BATCHES[0])))

    def _measure(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> int:
        def real(index: int, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = (batch, *value.shape[1:]) if index in CONVOLUTIONS[func] else value.shape
            empty = torch.zeros(shape, dtype=value.dtype, device=self._device)
            return empty.contiguous(memory_format=_layout(value))

        inputs = [real(index, value) for index, value in enumerate(args)]
        sizes: list[int] = []

        def call() -> object:
            result = func(*inputs, **kwargs)
            sizes[:] = [storage.nbytes() for storage in storages_of(result)]
            return result

        call()  # fills caches
        return measure_peak(call, self._device) - sum(sizes)


class ScratchLog(StorageLog):
    """Logs storages, and the scratch memory of each convolution as if the device of ``scratch`` ran it."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in CONVOLUTIONS:
            taken = self._scratch.bytes_of(func, args, kwargs or {})
            self.changes += [Change(id(self), taken), Change(id(self), 0)]
        return result


def _described(value: Any, batched: bool) -> Any:
    """Return what matters of an argument, whatever the batch."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, _layout(value), tuple(value.shape[1:] if batched else value.shape)


def _layout(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
