"""The largest batch or image that fits into an amount of memory, predicted without running a training step.

The tensors of a step are counted on the meta device, where they take no memory. The scratch memory of convolutions
cannot be seen there: on the CPU copies in layouts that suit the processor, on a GPU a workspace. It is a sizeable part
of a step that holds little, and cannot be computed from shapes. So each distinct convolution is run on a few images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zoo.benchmark.network_setup import Setup
from zoo.benchmark.results import Results
from zoo.benchmark.strategies import Strategy, build_all, refusals_noted
from zoo.errors import ConfigError, VerificationError
from zoo.ops.abn import backend, reference
from zoo.ops.pooling import memory_format_of
from zoo.remat.memory_use import Change, StorageLog, count_memory, measure_memory, measure_peak, storages_of

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
TOLERANCE = 0.05
# Each convolution operator, and which of its arguments have the batch as their first dimension.
CONVOLUTIONS = {torch.ops.aten.convolution.default: (0,), torch.ops.aten.convolution_backward.default: (0, 1)}
# The scratch memory of a convolution is measured with these numbers of images. With fewer images, copies of the
# weights may be the larger part of it.
SCRATCH_BATCHES = (4, 8)


class TrainingBytes(NamedTuple):
    """Bytes that training takes.

    Args:
    - `constant`: bytes that are always there: parameters, momentum, buffers, and the images and label maps of a batch.
    - `step`: the most bytes that a step takes in addition at one time.
    """

    constant: int
    step: int

    @property
    def total(self) -> int:
        """The most bytes at one time."""
        return self.constant + self.step


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` stands for ("16GiB", "500 MB"); ConfigError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"{text!r} is no amount of memory; write it as 16GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


class MemoryPrediction:
    """Predicts what training a network with SGD and momentum takes, from the network on the meta device.

    Raises ConfigError for a strategy that the network does not have.

    Args:
    - `setup`: the network, and the number and size of its images, unless they are given to a prediction.
    - `strategy`: how the network saves memory.
    - `scratch`: count the scratch memory that convolutions take on this device. False: tensors alone, which are the
      same on any device.
    """

    def __init__(self, setup: Setup, strategy: Strategy, *, scratch: bool = True) -> None:
        self._setup = replace(setup, device=torch.device("meta"))
        self._model = strategy.build(self._setup)
        self._scratch = ConvolutionScratch(setup.device) if scratch else None
        # Tensors on the meta device are to be treated by the kernels that the real device would use.
        self._reference = backend.kernels_for(torch.empty(0, device=setup.device)) is reference
        self._counted: dict[tuple[int, int], TrainingBytes] = {}

    def bytes_for(self, batch: int, size: int | None = None) -> TrainingBytes:
        """Return the bytes that training with ``batch`` images takes, of ``size`` pixels a side or the setup's."""
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
        """Return the largest batch for which training takes at most ``memory_bytes``, and what it takes.

        Where not even 2 images fit, the batch is 0 and the bytes are those of 2 images: a norm needs that many.
        """
        return _largest(self.bytes_for, memory_bytes, power=1)

    def largest_size(self, memory_bytes: int, multiple: int) -> tuple[int, TrainingBytes]:
        """Return the largest side of an image for which training with the setup's batch takes at most ``memory_bytes``.

        It is a ``multiple`` of that many pixels, at least 2 times, or 0, see `largest_batch`; and what it takes.
        """
        count, taken = _largest(lambda n: self.bytes_for(self._setup.batch, n * multiple), memory_bytes, power=2)
        return count * multiple, taken


def _largest(bytes_for: Callable[[int], TrainingBytes], memory_bytes: int, power: int) -> tuple[int, TrainingBytes]:
    """Return the largest whole number n for which ``bytes_for`` is at most ``memory_bytes``, and these bytes.

    The bytes grow with n ** ``power`` along pieces of straight lines, so that the next guess follows from two values.
    Where not even 2 fits, the result is 0 and the bytes of 2.
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
    """The scratch memory of convolutions on ``device``, where each distinct convolution is measured once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[str, list[int]] = {}

    def bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the peak of one of the `CONVOLUTIONS` without its results; ``args`` may be on the meta device.

        The scratch memory grows linearly with the batch: that of any batch follows from two.
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
    """Logs storages, and the scratch memory of each convolution as if the device of ``scratch`` ran it."""

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
    """Return an argument of a convolution, or of a tensor dtype, layout and shape without the batch."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, memory_format_of(value), tuple(value.shape[1:] if has_batch else value.shape)


def constant_bytes(model: nn.Module, setup: Setup) -> int:
    """Return the bytes of the parameters, of their momentum, of the buffers and of a batch."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return 2 * parameters + buffers + setup.input_bytes


def report_fits(results: Results, setup: Setup, strategies: Sequence[Strategy], memory_bytes: int) -> bool:
    """Add the largest batch of each strategy that the network has, and what it takes; return whether any fits."""
    case, largest = replace(setup.case, shape=setup.image_shape), 0
    for strategy in _available(results, setup, strategies):
        with refusals_noted(results, setup, strategy.name):
            batch, taken = MemoryPrediction(setup, strategy).largest_batch(memory_bytes)
            largest = max(largest, batch)
            results.add(case, strategy.name, "largest batch", "images", [batch])
            if batch == 0:
                results.note(
                    f"does not fit: {strategy.name} needs {taken.total:,} bytes for a batch of 2 at {setup.size} px, "
                    f"there are {memory_bytes:,}"
                )
                continue
            results.add(case, strategy.name, "needed", "MB", [taken.total / 1e6])
            results.add(case, strategy.name, "of it constant", "MB", [taken.constant / 1e6])
    return largest > 0


def check_predictions(results: Results, setup: Setup, strategies: Sequence[Strategy], batches: Sequence[int]) -> None:
    """Add the predicted bytes of each strategy, and the bytes of a real step.

    VerificationError, once all have been added, if any of them differ by more than 5 %.
    """
    wrong = []
    for strategy in _available(results, setup, strategies):
        with refusals_noted(results, setup, strategy.name):
            for batch in batches:
                batch_setup = replace(setup, batch=batch)
                predicted, taken = predict_and_measure(batch_setup, strategy)
                difference = predicted / taken - 1
                results.add(batch_setup.case, strategy.name, "predicted", "MB", [predicted / 1e6])
                results.add(batch_setup.case, strategy.name, "taken", "MB", [taken / 1e6])
                results.add(batch_setup.case, strategy.name, "difference", "%", [100 * difference])
                if abs(difference) > TOLERANCE:
                    wrong.append(f"{strategy.name} at batch {batch}: {100 * difference:+.1f} %")
    if wrong:
        raise VerificationError(f"predictions are off by more than {100 * TOLERANCE:.0f} %: {'; '.join(wrong)}")


def predict_and_measure(setup: Setup, strategy: Strategy) -> tuple[int, int]:
    """Return the bytes that training with the setup's batch takes: as predicted, and as measured in a real step."""
    predicted, model = MemoryPrediction(setup, strategy).bytes_for(setup.batch), strategy.build(setup)
    taken = predicted.constant + measure_memory(setup.forward_of(model), model.parameters()).peak
    return predicted.total, taken


def _available(results: Results, setup: Setup, strategies: Sequence[Strategy]) -> list[Strategy]:
    """Return the strategies that the network has, and note which it does not have.

    To learn this, the networks are built on the meta device, which takes neither time nor memory. ConfigError where
    even the baseline cannot be built.
    """
    return list(build_all(results, strategies, replace(setup, device=torch.device("meta"))))
