"""Predicts the largest batch or image that fits in memory, without running a training step.

The tensors of a step are counted on the meta device, where the scratch memory of convolutions is not visible.

Tested by tests/reproduce/test_inplace_abn.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.ops.abn import backend
from zoo.remat.memory_use import count_memory


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

    Raises ConfigError for a strategy that the network does not support.
    """

    def __init__(self, setup: Setup, strategy: Strategy) -> None:
        self._setup = replace(setup, device=torch.device("meta"))
        self._model = strategy.build(self._setup)
        # Meta tensors must use the same kernels as the real device.
        self._reference = backend.name_for(setup.device) == "reference"
        self._counted: dict[tuple[int, int], TrainingBytes] = {}

    def bytes_for(self, batch: int, size: int | None = None) -> TrainingBytes:
        """Return the memory of training with ``batch`` images of ``size`` pixels (default: the setup's size)."""
        size = size or self._setup.size
        if (batch, size) not in self._counted:
            self._counted[batch, size] = self._count(replace(self._setup, batch=batch, size=size))
        return self._counted[batch, size]

    def _count(self, setup: Setup) -> TrainingBytes:
        with backend.forced("reference") if self._reference else nullcontext():
            step = count_memory(setup.forward_of(self._model), self._model.parameters())
        return TrainingBytes(constant_bytes(self._model, setup), step.peak)

    def largest_batch(self, memory_bytes: int) -> tuple[int, TrainingBytes]:
        """Return the largest batch whose training fits in ``memory_bytes``, and its memory.

        If not even 2 images fit, which a norm needs, the batch is 0 and the memory is for 2 images.
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


def constant_bytes(model: nn.Module, setup: Setup) -> int:
    """Return the bytes of parameters, momentum, buffers and a batch."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return 2 * parameters + buffers + setup.input_bytes
