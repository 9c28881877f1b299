"""Answers whether a training step fits into memory, and which batch is the largest that does.

Steps with other batches are counted on the meta device, which takes no memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.errors import ConfigError, join_names
from zoo.memory.containers import tensors_in
from zoo.memory.release import OptimizerTwin
from zoo.memory.trial import ModelInputs, Trial, copy_tensors
from zoo.ops.meta_attention import meta_attention
from zoo.remat._budget import Budget, parse_limit
from zoo.remat._limit import MARGIN, optimizer_states
from zoo.tables import bytes_text

PLACE = "MemoryReport.largest_batch"
REMEDY = "make a report of each batch, and ask its fits()"


@dataclass(frozen=True, repr=False)
class Fit:
    """Whether a training step fits into memory, as a truth value. Its string has the margin in bytes.

    Args:
    - `peak`: bytes of the step at its peak; infinite if they could not be allocated.
    - `limit`: bytes of the memory.
    """

    peak: float
    limit: int

    def __bool__(self) -> bool:
        """Return whether the step fits."""
        return self.peak <= self.limit

    def __repr__(self) -> str:
        """Return the answer, such as "fits: 14.2 GB of 24 GB, 9.8 GB left"."""
        if self.peak == math.inf:
            return "does not fit: out of memory"
        taken, margin = f"{bytes_text(self.peak)} of {bytes_text(self.limit)}", bytes_text(abs(self.limit - self.peak))
        return f"fits: {taken}, {margin} left" if self else f"does not fit: {taken}, {margin} too much"


class Subject:
    """Counts training steps of a network with other batches.

    Keeps the network on its device, and the inputs on the meta device.

    Args:
    - `budget`: the budget of lean training.
    - `twin`: builds the optimizer. Its step is part of a training step.
    """

    def __init__(
        self, model: nn.Module, inputs: ModelInputs, budget: Budget, twin: OptimizerTwin | None = None
    ) -> None:
        self._model, self._budget, self._twin = model, budget, twin
        self._inputs: ModelInputs = copy_tensors(inputs, lambda each: each.to("meta"))
        self._has_autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        self._state_bytes = sum(each.nbytes for each in optimizer_states(list(model.parameters())))

    def state_bytes(self, copies: int) -> int:
        """Return the bytes of the optimizer's state; before its first step, ``copies`` of the trained parameters."""
        trained = sum(each.nbytes for each in self._model.parameters() if each.requires_grad)
        return self._state_bytes or copies * trained

    def missing_bytes(self, copies: int) -> int:
        """Return the part of `state_bytes` that a measured step lacks."""
        if self._twin is not None:
            return 0
        return self.state_bytes(copies) - self._state_bytes

    def largest_batch(self, memory: int | str, *, is_plain: bool, copies: int) -> int:
        """Return the largest batch whose training step fits (see `MemoryReport.largest_batch`)."""
        limit = parse_limit(memory, PLACE)
        if self._budget.peak_bytes is not None and not is_plain:
            limit = min(limit, int((1 - MARGIN) * self._budget.peak_bytes))
        if self._has_autocast:
            remedy = "convert the network to bfloat16, or make a report of each batch"
            raise ConfigError("batches are counted on the meta device, where autocast has no effect", PLACE, remedy)
        recurrent = {type(each).__name__ for each in self._model.modules() if isinstance(each, nn.RNNBase)}
        if recurrent:
            names = join_names(sorted(recurrent))
            what = f"batches are counted on the meta device, which does not run the fused kernels of {names}"
            raise ConfigError(what, PLACE, REMEDY)
        sizes = {len(each) for each in tensors_in(self._inputs)[:1] if each.ndim > 0}
        if not sizes:
            raise ConfigError("the first input has no batch dimension", PLACE, "pass a batch to zoo.memory_report")
        try:
            model = _meta_copy(self._model)
            with torch.enable_grad(), meta_attention():
                bytes_for = cache(partial(self._peak, model, sizes.pop(), is_plain))
                states = 0 if self._twin is not None else self.state_bytes(copies)
                return _largest_batch(lambda batch: bytes_for(batch) + states, limit)
        except ConfigError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"batches are counted on the meta device, where {type(self._model).__name__} does not run: {reason}",
                PLACE,
                REMEDY,
            ) from error

    def _peak(self, model: nn.Module, given: int, is_plain: bool, batch: int) -> float:
        """Return the peak of a step, including the state of a given optimizer."""

        def scaled(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or len(tensor) != given:
                return tensor
            return tensor.new_empty((batch, *tensor.shape[1:])).requires_grad_(tensor.requires_grad)

        # The state of the given optimizer is on the device of the network, not on the meta device.
        twin = None if self._twin is None else replace(self._twin, optimizer=self._twin.build(model))
        if twin is not None:
            twin.optimizer.state.clear()
        trial = Trial(model, copy_tensors(self._inputs, scaled), PLACE, twin)
        if is_plain:
            return trial.plain().peak
        return trial.lean(Budget(0.0 if self._budget.peak_bytes is not None else self._budget.share)).peak


def _largest_batch(bytes_for: Callable[[int], float], limit: int) -> int:
    if bytes_for(2) == bytes_for(4):
        raise ConfigError(
            "a step takes the same memory for 2 and 4 samples",
            PLACE,
            "make the report of a batch, whose inputs have the batch as their first dimension",
        )
    found = largest_fitting(bytes_for, limit)
    if found == 0:
        try:
            return int(bytes_for(1) <= limit)
        except ValueError:  # a batch norm may need more than one value
            return 0
    return found


def largest_fitting(bytes_for: Callable[[int], float], memory_bytes: int, power: int = 1) -> int:
    """Return the largest integer n for which ``bytes_for(n)`` fit in ``memory_bytes``; 0 if 2 does not fit.

    Interpolates between two values, because the bytes are piecewise linear in n ** ``power``.
    """
    fits, taken = 2, bytes_for(2)
    if taken > memory_bytes:
        return 0
    number, too_large = 4, None
    while too_large is None or too_large - fits > 1:
        tried = bytes_for(number)
        slope = (tried - taken) / (number**power - fits**power)
        if tried <= memory_bytes:
            fits, taken = number, tried
        else:
            too_large = number
        guess = int((fits**power + (memory_bytes - taken) / slope) ** (1 / power)) if slope > 0 else 2 * number
        number = max(fits + 1, guess if too_large is None else min(guess, too_large - 1))
    return fits


class _ToMeta(TorchFunctionMode):
    """Places copies of tensors on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.clone:  # nn.Parameter.__deepcopy__ calls it
            return torch.empty_like(args[0], device="meta")
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                copied = torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
                memo[id(tensor)] = copied
            return memo[id(tensor)]
        return func(*args, **kwargs or {})


def _meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a network on the meta device."""
    with _ToMeta():
        return copy.deepcopy(model)
