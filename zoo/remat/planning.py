"""Finds what to recompute so that a training step stays within a limit, before the first step.

For a limit on the peak, steps are measured: at first with all convolutions and matrix products recomputed, then with
the expensive ones saved, as many as fit. No step that is likely to exceed the limit runs. For a fraction of the bytes
that plain training holds, forward passes are recorded: at first with all products saved, then with the cheapest ones
recomputed, until the bytes are within the limit.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from zoo.errors import ConfigError
from zoo.remat.budget import Budget, Decision, Planned, StepPeak, bytes_text
from zoo.remat.eager.recording import traits_of
from zoo.remat.eager.rematerializer import Rematerializer
from zoo.remat.eager.tracking import copy_of, is_trackable
from zoo.remat.effects import collected
from zoo.remat.memory_use import AllocatorLog, StorageLog, summarize, watched
from zoo.remat.rules import Operation, call_in_mode
from zoo.remat.trial import NoGradientsError, as_leaf, clone, default_loss, device_of, unchanged
from zoo.torch_internals.data import memory_id, set_versions, storage_id, tensors_of, tree_map
from zoo.torch_internals.dispatch import EagerDispatchMode, is_profiling

MARGIN = 0.02  # of the limit, for what a real step takes beyond a measured one
CLOSE = 0.05  # of the limit: a peak that is so close below it is not improved
MAX_TRIALS = 4  # measured after the first one, so that planning takes no more than ten steps' time

PLACE = "budget of zoo.lean"  # in messages

_optimizers: WeakSet[Optimizer] = WeakSet()


class OutputsAreFreed(UserWarning):
    """A limit in bytes is met only if the outputs of the network are freed before backward."""


def plan(
    budget: Budget,
    module: nn.Module,
    rematerializer: Callable[..., Rematerializer],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int:
    """Set ``budget.flops_per_byte`` so that a training step stays within the limit.

    Returns the peak of the step in bytes if the budget limits it, otherwise 0.

    For a fraction, forward runs several times; if the fraction cannot be met, it is missed by as little as possible.
    For a limit on the peak, forward and backward run several times. If a step with inputs of this size or larger was
    planned before, nothing runs and the price is looked up. Buffers, gradients, attributes and random states are
    restored (`zoo.remat.trial.unchanged`).

    The peak counts all memory: parameters, buffers, gradients, the state of optimizers that have made a step,
    inputs, and everything from the start of forward to the end of backward. On CUDA, all that the process had
    allocated before counts too.

    A call that saves nothing for backward and the first call of lazy modules are not planned: they recompute all they
    can, and 0 is returned.

    Args:
    - `module`: the network.
    - `rematerializer`: returns a `Rematerializer` for a budget and a ``log`` of decisions.
    - `call`: computes the outputs of the module from ``args`` and ``kwargs``.

    Raises ConfigError if no training step stays within the limit on the peak.
    """
    watch_optimizers()
    inputs = tensors_of((args, kwargs))
    own = [*module.parameters(), *module.buffers()]
    if any(map(is_lazy, own)) or not any(each.requires_grad for each in (*own, *inputs)):
        return _skip(budget)
    input_bytes = sum(each.nbytes for each in inputs)
    if budget.peak_bytes is None:
        if budget.planned is None or input_bytes > budget.planned.input_bytes:
            _meet_share(budget, module, rematerializer, call, args, kwargs)
        return 0
    existing = _existing_bytes(module, inputs)
    room = (1 - MARGIN) * budget.peak_bytes - existing
    accumulates = _accumulates(module)
    planned = budget.planned
    if planned is not None and input_bytes <= planned.input_bytes:
        if budget.flops_per_byte in planned.prices:
            bound = planned.bytes_at(budget.flops_per_byte, accumulates=accumulates)
            if bound <= room:
                return existing + bound
        price = planned.lowest_price(room, accumulates=accumulates)
    else:
        planned = price = None

    def measure(price: float, keeps_outputs: bool) -> tuple[StepPeak, list[Decision]]:
        decisions: list[Decision] = []
        context = rematerializer(Budget(price), log=decisions)
        return _measure(module, context, call, args, kwargs, keeps_outputs=keeps_outputs), decisions

    if price is None:
        keeps_outputs = planned is None or planned.keeps_outputs
        try:
            with collected(PLACE):
                planned, price = _find_price(measure, input_bytes, room, accumulates, keeps_outputs)
        except NoGradientsError:
            return _skip(budget)
        if price is None:
            missing = planned.bytes_at(planned.prices[-1], accumulates=accumulates) - room
            least = budget.peak_bytes + missing / (1 - MARGIN)
            when = "" if optimizer_states(module) else "without the state of the optimizer, "
            raise ConfigError(
                f"{when}a training step takes at least {bytes_text(least)}, "
                f"more than the limit of {bytes_text(budget.peak_bytes)}",
                PLACE,
                "raise the limit, or train with smaller batches",
            )
        if not planned.keeps_outputs:
            warnings.warn(
                f"the limit of {bytes_text(budget.peak_bytes)} is met only if the outputs of the network are freed "
                "before backward: compute the loss as criterion(model(x), target), without assigning the outputs to a "
                "variable",
                OutputsAreFreed,
                stacklevel=2,
            )
    assert planned is not None
    budget.planned, budget.flops_per_byte = planned, price
    return existing + planned.bytes_at(price, accumulates=accumulates)


def _meet_share(
    budget: Budget,
    module: nn.Module,
    rematerializer: Callable[..., Rematerializer],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise the price until a recorded forward pass holds no more than the share of plain training, if possible.

    One pass would not do: the bytes fall by less than the recomputed outputs take, as recipes hold their inputs.
    """

    def decisions_at(price: float) -> list[Decision]:
        decisions: list[Decision] = []
        copied_args, copied_kwargs = tree_map(lambda each: clone(as_leaf(each)), (args, kwargs))
        with unchanged(module), _RestoredParameters(module), rematerializer(Budget(price), log=decisions):
            call(*copied_args, **copied_kwargs)
        return decisions

    price, higher = -1.0, 0.0
    with collected(PLACE):
        while higher > price:
            price, decisions = higher, decisions_at(higher)
            higher = _raised_price(price, decisions, budget)
    if any(each.plain_bytes for each in decisions):
        input_bytes = sum(each.nbytes for each in tensors_of((args, kwargs)))
        budget.flops_per_byte, budget.planned = price, Planned(input_bytes, {}, StepPeak(0, 0), keeps_outputs=True)
    else:
        _skip(budget)


def _raised_price(price: float, decisions: Iterable[Decision], budget: Budget) -> float:
    """Return the lowest price at which a forward pass that decided so at ``price`` would hold no more than the limit.

    If there is none, it is the highest price; at least it is ``price``.
    """
    held = plain = 0
    candidates: Counter[float] = Counter()
    for decision in decisions:
        held += decision.lean_bytes
        plain += decision.plain_bytes
        if decision.is_kept and decision.flops_per_byte is not None and decision.flops_per_byte > price:
            candidates[decision.flops_per_byte] += decision.bytes
    limit = budget.held_limit(plain)
    for candidate in sorted(candidates):
        if held <= limit:
            break
        held -= candidates[candidate]
        price = candidate
    return price


def _skip(budget: Budget) -> int:
    """Let this call recompute all it can and leave planning to the next call; return 0."""
    budget.flops_per_byte, budget.planned = float("inf"), Planned(-1, {}, StepPeak(0, 0), keeps_outputs=True)
    return 0


def _find_price(
    measure: Callable[[float, bool], tuple[StepPeak, list[Decision]]],
    input_bytes: int,
    room: float,
    accumulates: bool,
    keeps_outputs: bool,
) -> tuple[Planned, float | None]:
    """Return measured steps, and up to which price operations are recomputed for a peak close to ``room``."""

    def peak_of(step: StepPeak) -> int:
        return step.accumulating if accumulates else step.peak

    least, decisions = measure(float("inf"), keeps_outputs)
    if peak_of(least) > room and keeps_outputs:
        keeps_outputs = False
        least, decisions = measure(float("inf"), keeps_outputs)
    sizes: dict[float, int] = {}
    for decision in decisions:
        if decision.flops_per_byte is not None and not decision.is_kept:
            # Views of an output have its price and its memory.
            sizes[decision.flops_per_byte] = max(sizes.get(decision.flops_per_byte, 0), decision.bytes)
    planned = Planned(input_bytes, sizes, least, keeps_outputs)
    if peak_of(least) > room:
        return planned, None
    low, high = 0, len(planned.prices) - 1  # the peak at the price `high` is within the limit
    for _ in range(MAX_TRIALS):
        if low == high or peak_of(planned.steps[planned.prices[high]]) > (1 - CLOSE) * room:
            break
        price = planned.lowest_price(room, accumulates=accumulates)
        middle = high if price is None else planned.prices.index(price)
        if not low <= middle < high:  # nothing more is known to fit
            middle = (low + high) // 2
        planned.add(planned.prices[middle], measure(planned.prices[middle], keeps_outputs)[0])
        if peak_of(planned.steps[planned.prices[middle]]) <= room:
            high = middle
        else:
            low = middle + 1
    return planned, planned.prices[high]


def count_peak(
    module: nn.Module,
    context: AbstractContextManager[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    log: StorageLog,
) -> int:
    """Return the peak of a training step in bytes, excluding the scratch memory of operations.

    Forward runs in ``context``. Memory that existed before counts as in `plan`.
    """
    inputs = tensors_of((args, kwargs))
    step = _measure(module, context, module, args, kwargs, keeps_outputs=True, log=log)
    return _existing_bytes(module, inputs) + (step.accumulating if _accumulates(module) else step.peak)


def _measure(
    module: nn.Module,
    context: AbstractContextManager[Any],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keeps_outputs: bool,
    log: StorageLog | AllocatorLog | None = None,
) -> StepPeak:
    """Return the peak bytes that forward, in ``context``, and backward allocate; accumulates no gradients."""
    inputs = tree_map(as_leaf, (args, kwargs))
    args, kwargs = tree_map(clone, inputs)  # forward may overwrite its inputs
    parameters = [each for each in module.parameters() if each.requires_grad]
    sources = [*parameters, *(each for each in tensors_of(inputs) if each.requires_grad)]
    device = device_of(module)
    # A profiler of the user's is left alone: tensors are counted then, without the scratch memory of operations.
    counts_tensors = device.type == "meta" or (device.type != "cuda" and is_profiling())
    log = log or (StorageLog() if counts_tensors else AllocatorLog(device))
    gc.collect()
    with unchanged(module), log, _RestoredParameters(module):
        with context:
            outputs = [call(*args, **kwargs)]
        loss = default_loss(outputs[0])
        if not keeps_outputs:
            outputs.clear()
        with watched(parameters):
            gradients = torch.autograd.grad(loss, sources, allow_unused=True)
    dense = [each for each in gradients[: len(parameters)] if each is not None and each.layout is torch.strided]
    addresses = log.addresses(each.untyped_storage() for each in dense)
    memory = summarize(log.changes, len(log.changes), addresses)
    largest = max((each.nbytes for each in dense), default=0)
    return StepPeak(memory.peak, memory.peak_without_gradients + largest)


class _RestoredParameters(EagerDispatchMode):
    """A context that restores the parameters, and their gradients, which forward overwrites. Only these are copied."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        parameters = list(module.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        self._unwritten = {memory_id(each): each for each in (*parameters, *gradients) if is_trackable(each)}
        self._copies: list[tuple[Tensor, Tensor, int]] = []

    def __torch_dispatch__(
        self, operation: Operation, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for written in traits_of(operation).written_tensors(args, kwargs or {}):
            tensor = self._unwritten.pop(memory_id(written), None)
            if tensor is not None:
                self._copies.append((tensor, copy_of(tensor), tensor._version))
        return call_in_mode(operation, *args, **kwargs or {})

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, before, version in self._copies:
            with torch.no_grad():
                tensor.copy_(before)
            set_versions([tensor], [version])
        self._unwritten.clear()


def _accumulates(module: nn.Module) -> bool:
    return any(each.grad is not None for each in module.parameters())


def _existing_bytes(module: nn.Module, inputs: list[Tensor]) -> int:
    """Return the bytes that exist before a step, including its inputs."""
    device = device_of(module)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    parameters = list(module.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    tensors = (*parameters, *module.buffers(), *gradients, *optimizer_states(module), *inputs)
    storages = {storage_id(storage): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    return sum(storages.values())


def optimizer_states(module: nn.Module) -> list[Tensor]:
    """Return the state of optimizers that have made a step, for the parameters of a module."""
    return tensors_of([optimizer.state.get(each) for optimizer in _optimizers for each in module.parameters()])


@cache
def watch_optimizers() -> None:
    """Remember all optimizers from their next step on."""
    register_optimizer_step_post_hook(lambda optimizer, *_: _optimizers.add(optimizer))
