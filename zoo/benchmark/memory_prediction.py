"""Predicts the largest batch or image that fits in memory, without running a training step.

The tensors of a step are counted on the meta device. The scratch memory of convolutions (reordered copies on a CPU, a
workspace on a GPU) is not visible there and cannot be computed from shapes, but is a large part of steps that save
few activations. Each distinct convolution is therefore run on a few images.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.ops.abn import backend, reference
from zoo.ops.pooling import memory_format_of
from zoo.remat.memory_use import Change, StorageLog, count_memory, measure_peak, storages_of

# Convolution operators, and the indices of their arguments whose first dimension is the batch.
CONVOLUTIONS = {torch.ops.aten.convolution.default: (0,), torch.ops.aten.convolution_backward.default: (0, 1)}
# Numbers of images for measuring scratch memory. With fewer images, copies of the weights may dominate.
SCRATCH_BATCHES = (4, 8)


class TrainingBytes(NamedTuple):
    """Memory of training.

    Args:
    - `constant`: bytes of parameters, momentum, buffers, and the images and label maps of a batch.
    - `step`: peak of the additional bytes of a step.
    """

    constant: int
    step: int

    @property
    def total(self) -> int:
        """Peak memory in bytes."""
        return self.constant + self.step


class MemoryPrediction:
    """Predicts the memory of training a network with SGD and momentum, with the network on the meta device.

    Args:
    - `setup`: the network, and the default number and size of its images.
    - `strategy`: the memory strategy.
    - `scratch`: include the scratch memory of convolutions on the setup's device. Otherwise only tensors are counted,
      which are the same on any device.

    Raises ConfigError for a strategy that the network does not support.
    """

    def __init__(self, setup: Setup, strategy: Strategy, *, scratch: bool = True) -> None:
        self._setup = replace(setup, device=torch.device("meta"))
        self._model = strategy.build(self._setup)
        self._scratch = ConvolutionScratch(setup.device) if scratch else None
        # Meta tensors must use the same kernels as the real device.
        self._reference = backend.kernels_for(torch.empty(0, device=setup.device)) is reference
        self._counted: dict[tuple[int, int], TrainingBytes] = {}

    def bytes_for(self, batch: int, size: int | None = None) -> TrainingBytes:
        """Return the memory of training with ``batch`` images of ``size`` pixels (default: the setup's size)."""
        size = size or self._setup.size
        if (batch, size) not in self._counted:
            self._counted[batch, size] = self._count(replace(self._setup, batch=batch, size=size))
        return self._counted[batch, size]

    def _count(self, setup: Setup) -> TrainingBytes:
        with backend.forced("reference") if self._reference else nullcontext():
            log = None if self._scratch is None else _StorageAndScratchLog(self._scratch)
            step = count_memory(setup.forward_of(self._model), self._model.parameters(), log)
        return TrainingBytes(constant_bytes(self._model, setup), step.peak)

    def largest_batch(self, memory_bytes: int) -> tuple[int, TrainingBytes]:
        """Return the largest batch whose training fits in ``memory_bytes``, and its memory.

        If not even 2 images fit, which a norm needs, the batch is 0 and the memory is that of 2 images.
        """
        return _largest(self.bytes_for, memory_bytes, power=1)

    def largest_size(self, memory_bytes: int, multiple: int) -> tuple[int, TrainingBytes]:
        """Return the largest image size whose training with the setup's batch fits in ``memory_bytes``, and its memory.

        The size is a ``multiple`` of that many pixels, at least twice as many, or 0 as in `largest_batch`.
        """
        count, taken = _largest(lambda n: self.bytes_for(self._setup.batch, n * multiple), memory_bytes, power=2)
        return count * multiple, taken


def _largest(bytes_for: Callable[[int], TrainingBytes], memory_bytes: int, power: int) -> tuple[int, TrainingBytes]:
    """Return the largest integer n whose ``bytes_for`` fit in ``memory_bytes``, and these bytes.

    The bytes are piecewise linear in n ** ``power``, so the next guess is an interpolation of two values.
    If not even 2 fits, returns 0 and the bytes of 2.
    """
    fits, taken = 2, bytes_for(2)
    if taken.total > memory_bytes:
        return 0, taken
    number, too_large = 4, None
    while too_large is None or too_large - fits > 1:
        tried = bytes_for(number)
        slope = (tried.total - taken.total) / (number**power - fits**power)
        if tried.total <= memory_bytes:
            fits, taken = number, tried
        else:
            too_large = number
        guess = int((fits**power + (memory_bytes - taken.total) / slope) ** (1 / power))
        number = max(fits + 1, guess if too_large is None else min(guess, too_large - 1))
    return fits, taken


class ConvolutionScratch:
    """The scratch memory of convolutions on ``device``; each distinct convolution is measured once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[str, list[int]] = {}

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the peak memory of one of the `CONVOLUTIONS` without its results; ``args`` may be meta tensors.

        Scratch memory is linear in the batch, so two measurements determine it.
        """
        key = f"{func} {[_without_batch(arg, index in CONVOLUTIONS[func]) for index, arg in enumerate(args)]}"
        if key not in self._measured:
            self._measured[key] = [self._measure(func, args, kwargs, batch) for batch in SCRATCH_BATCHES]
        first, second = self._measured[key]
        per_image = (second - first) / (SCRATCH_BATCHES[1] - SCRATCH_BATCHES[0])
        return max(0, int(first + per_image * (args[0].shape[0] - SCRATCH_BATCHES[0])))

    def _measure(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> int:
        def on_device(index: int, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shape = (batch, *value.shape[1:]) if index in CONVOLUTIONS[func] else value.shape
            zeros = torch.zeros(shape, dtype=value.dtype, device=self._device)
            return zeros.contiguous(memory_format=memory_format_of(value))

        inputs = [on_device(index, value) for index, value in enumerate(args)]
        sizes: list[int] = []

        def call() -> object:
            result = func(*inputs, **kwargs)
            sizes[:] = [storage.nbytes() for storage in storages_of(result)]
            return result

        call()  # fills caches
        return measure_peak(call, self._device) - sum(sizes)


class _StorageAndScratchLog(StorageLog):
    """Logs storages, and the scratch memory that each convolution would need on the device of ``scratch``."""

    def __init__(self, scratch: ConvolutionScratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in CONVOLUTIONS:
            scratch_bytes = self._scratch.bytes_of(func, args, kwargs or {})
            self.changes += [Change(id(self), scratch_bytes), Change(id(self), 0)]
        return result


def _without_batch(value: Any, has_batch: bool) -> Any:
    """Return a convolution's argument; for a tensor its dtype, layout and shape without the batch dimension."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, memory_format_of(value), tuple(value.shape[1:] if has_batch else value.shape)


def constant_bytes(model: nn.Module, setup: Setup) -> int:
    """Return the bytes of parameters, momentum, buffers and a batch."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return 2 * parameters + buffers + setup.input_bytes
