"""Finds what to recompute so that the peak of a training step stays within a limit in bytes.

Steps are measured before the first real one: at first with all convolutions and matrix products recomputed, then with
the expensive ones saved, as many as fit. No step that is likely to exceed the limit runs.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from zoo.errors import ConfigError
from zoo.ops.context import restored_buffers
from zoo.remat.budget import Budget, Decision, Planned
from zoo.remat.eager.rematerializer import Rematerializer
from zoo.remat.memory_use import AllocatorLog, StorageLog, summarize
from zoo.torch_internals import storage_id, tree_leaves, tree_map

MARGIN = 0.02  # of the limit, for what a real step takes beyond a measured one
CLOSE = 0.05  # of the limit: a peak that is so close below it is not improved
MAX_STEPS = 10  # measured after the first one


class NoGradientsError(Exception):
    """No output of a call requires gradients."""


_optimizers: WeakSet[Optimizer] = WeakSet()


def plan(
    budget: Budget,
    module: nn.Module,
    rematerializer: Callable[..., Rematerializer],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> int:
    """Set ``budget.flops_per_byte`` so that a training step stays within ``budget.peak_bytes``; return its peak.

    The peak is that of all memory: parameters, buffers, gradients, the state of optimizers that have made a step,
    inputs, and everything from the start of forward to the end of backward. On CUDA, all that the process had
    allocated before counts too. Returns immediately if the budget was planned for such a step before. Otherwise forward
    and backward run several times. The random state, buffers and gradients are then as before.

    A call without a backward pass, and the first call of lazy modules, recompute all they can, and the peak is 0. The
    next call is planned.

    Args:
    - `module`: the network.
    - `rematerializer`: returns a `Rematerializer` for a budget and a ``log`` of decisions.
    - `call`: computes the outputs of the module from ``args`` and ``kwargs``.

    Raises ConfigError if the limit is impossible, or if forward overwrites parameters.
    """
    assert budget.peak_bytes is not None
    _watch_optimizers()
    inputs = _tensors((args, kwargs))
    own = [*module.parameters(), *module.buffers()]
    if any(map(is_lazy, own)) or not any(each.requires_grad for each in (*own, *inputs)):
        return _skip(budget)
    existing, input_bytes = _existing_bytes(module, inputs), sum(each.nbytes for each in inputs)
    limit = (1 - MARGIN) * budget.peak_bytes
    planned = budget.planned
    if planned is None or input_bytes > planned.input_bytes or existing + planned.step_bytes > limit:

        def measure(price: float) -> tuple[int, list[Decision]]:
            decisions: list[Decision] = []
            versions = [each._version for each in module.parameters()]
            with unchanged(module):
                peak = _measure(module, rematerializer(Budget(price), log=decisions), call, args, kwargs)
            if versions != [each._version for each in module.parameters()]:
                raise ConfigError(
                    "forward overwrites parameters, so that steps cannot be measured before training",
                    "budget of zoo.lean",
                    "start again with a fraction or a cost limit such as 40 FLOP/B",
                )
            return existing + peak, decisions

        try:
            peak, budget.flops_per_byte = _lowest_price(budget, limit, measure)
        except NoGradientsError:
            return _skip(budget)
        planned = budget.planned = Planned(peak - existing, input_bytes)
    return existing + planned.step_bytes


def _skip(budget: Budget) -> int:
    """Let a call recompute all it can, and the next one be planned; return 0."""
    budget.flops_per_byte, budget.planned = float("inf"), Planned(0, 0)
    return 0


def _lowest_price(
    budget: Budget, limit: float, measure: Callable[[float], tuple[int, list[Decision]]]
) -> tuple[int, float]:
    """Return the peak of a step close to the limit, and up to which price it recomputes operations."""
    peak, decisions = measure(float("inf"))
    budget.check_possible(round(peak / (1 - MARGIN)))
    sizes: Counter[float] = Counter()
    for decision in decisions:
        if decision.flops_per_byte is not None and not decision.is_kept:
            sizes[decision.flops_per_byte] += decision.bytes
    prices = [0.0, *sorted(sizes)]
    low, high = 0, len(prices) - 1  # the peak at the price `high` is within the limit
    is_bound = True
    for _ in range(MAX_STEPS):
        if low == high or peak > (1 - CLOSE) * limit:
            break
        # Saving an output adds its bytes to the peak at most. What was measured to be wrong is bisected.
        middle, room = high, limit - peak
        while is_bound and middle > low and sizes[prices[middle]] <= room:
            room -= sizes[prices[middle]]
            middle -= 1
        middle = min(middle, high - 1) if is_bound else (low + high) // 2
        found, _ = measure(prices[middle])
        if found <= limit:
            peak, high = found, middle
        else:
            low, is_bound = middle + 1, False
    return peak, prices[high]


def count_peak(
    module: nn.Module, context: AbstractContextManager[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Return the peak of a training step, without the scratch memory of operations; forward runs in a context.

    Memory that existed before counts as in `plan`.
    """
    inputs = _tensors((args, kwargs))
    return _existing_bytes(module, inputs) + _measure(module, context, module, args, kwargs, StorageLog())


def _measure(
    module: nn.Module,
    context: AbstractContextManager[Any],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    log: StorageLog | AllocatorLog | None = None,
) -> int:
    """Return the most bytes that forward and backward allocate at one time; no gradient is accumulated."""
    inputs = tree_map(_leaf, (args, kwargs))
    args, kwargs = tree_map(_clone, inputs)  # forward may overwrite its inputs
    parameters = [each for each in module.parameters() if each.requires_grad]
    sources = [*parameters, *(each for each in _tensors(inputs) if each.requires_grad)]
    device = _device(module)
    log = log or (StorageLog() if device.type == "meta" else AllocatorLog(device))
    gc.collect()
    with log:
        with context:
            output = call(*args, **kwargs)
        gradients = torch.autograd.grad(_loss(output), sources, allow_unused=True)
    dense = [each for each in gradients[: len(parameters)] if each is not None and each.layout is torch.strided]
    storages = [each.untyped_storage() for each in dense]
    addresses = {storage_id(each) if isinstance(log, StorageLog) else each.data_ptr() for each in storages}
    memory = summarize(log.changes, len(log.changes), addresses)
    torch.clear_autocast_cache()  # it holds casts from graphs that are gone
    if any(each.grad is not None for each in parameters):  # gradients are added to those and freed
        return memory.peak_without_gradients + max((each.nbytes for each in dense), default=0)
    return memory.peak


def _loss(output: Any) -> Tensor:
    """Return the sum of the scalar outputs, which are losses, or if there are none the cross-entropy of the outputs."""
    outputs = trained_outputs(output)
    if not outputs and _tensors(output):
        raise NoGradientsError
    if not outputs:
        raise ConfigError(
            f"no output of type {type(output).__name__} requires gradients, so that no training step can be measured",
            "budget of zoo.lean",
            "return tensors, or lists, tuples and dicts of them, or pass a fraction as budget",
        )
    scalars = [each for each in outputs if each.ndim == 0]
    losses = [each.real.float() for each in scalars] or [_cross_entropy(each) for each in outputs]
    return torch.stack(losses).sum()


def trained_outputs(output: Any) -> list[Tensor]:
    """Return the outputs from which a training step can start."""
    return [each for each in _tensors(output) if each.requires_grad and each.numel() > 0]


def _cross_entropy(output: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension, with the first class as the target."""
    scores = (output.abs() if output.is_complex() else output.float()).reshape(-1, output.shape[-1])
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _device(module: nn.Module) -> torch.device:
    return next((each.device for each in module.parameters()), torch.device("cpu"))


def _existing_bytes(module: nn.Module, inputs: list[Tensor]) -> int:
    """Return the bytes that exist before a step, those of the inputs included."""
    device = _device(module)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    parameters = list(module.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    states = [optimizer.state.get(each) for optimizer in _optimizers for each in parameters]
    tensors = (*parameters, *module.buffers(), *gradients, *_tensors(states), *inputs)
    storages = {storage_id(storage): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    return sum(storages.values())


@cache
def _watch_optimizers() -> None:
    """Remember all optimizers from their next step on."""
    register_optimizer_step_post_hook(lambda optimizer, *_: _optimizers.add(optimizer))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Return a context that restores buffers and random number generators at its end."""
    devices = {each.device for each in module.parameters() if each.device.type == "cuda"}
    buffers = [(owner, name, each) for owner in module.modules() for name, each in owner.named_buffers(recurse=False)]
    with torch.random.fork_rng(devices=list(devices)), restored_buffers(module):
        try:
            yield
        finally:
            for owner, name, buffer in buffers:
                if getattr(owner, name, None) is not buffer:  # replaced by another tensor
                    setattr(owner, name, buffer)
