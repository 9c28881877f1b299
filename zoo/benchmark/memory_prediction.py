"""Predicts the largest batch or image that fits in memory, without running a training step.

The tensors of a step are counted on the meta device, where the scratch memory of convolutions is not visible.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.strategies import Strategy
from zoo.memory.allocations import count_memory
from zoo.memory.fit import largest_fitting
from zoo.ops import backend


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
        self._counted: dict[tuple[int, int], int] = {}

    def bytes_for(self, batch: int, size: int | None = None) -> int:
        """Return the peak memory of training with ``batch`` images of ``size`` pixels (default: the setup's size).

        It consists of parameters, momentum, buffers, the images and label maps of a batch, and the peak of the
        additional bytes of a step.
        """
        setup = replace(self._setup, batch=batch, size=size or self._setup.size)
        if (batch, setup.size) not in self._counted:
            with backend.force_back_end("reference") if self._reference else nullcontext():
                step = count_memory(setup.forward_of(self._model), self._model.parameters(), warmup=1).peak
            parameters = sum(parameter.nbytes for parameter in self._model.parameters())
            buffers = sum(buffer.nbytes for buffer in self._model.buffers())
            self._counted[batch, setup.size] = 2 * parameters + buffers + setup.input_bytes + step
        return self._counted[batch, setup.size]

    def largest_batch(self, memory_bytes: int) -> int:
        """Return the largest batch whose training fits in ``memory_bytes``; 0 if not even 2 images fit."""
        return largest_fitting(self.bytes_for, memory_bytes)

    def largest_size(self, memory_bytes: int, multiple: int) -> int:
        """Return the largest image size whose training with the setup's batch fits in ``memory_bytes``.

        The size is a ``multiple`` of that many pixels, at least twice as many, or 0.
        """
        return multiple * largest_fitting(
            lambda n: self.bytes_for(self._setup.batch, n * multiple), memory_bytes, power=2
        )
