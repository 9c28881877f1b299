"""Training steps on copies of a network, which `zoo.check` and `zoo.memory_report` run.

Tested by tests/memory/test_trial.py.
"""

from __future__ import annotations

import copy
import gc
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError, join_names, truncate
from zoo.remat.budget import Budget
from zoo.remat.limit import Measurement
from zoo.remat.plan import Planner
from zoo.remat.rematerializer import Rematerializer
from zoo.remat.step_log import StorageLog
from zoo.torch_internals.data import tensors_of, tree_map


class NoGradientsError(ConfigError):
    """No output of a call requires gradients."""


def default_loss(output: Any) -> Tensor:
    """Return the sum of the scalar outputs, which are losses; without scalars, the cross-entropy of the outputs.

    Raises NoGradientsError if there are tensors and none requires gradients, and ConfigError if there are no tensors.
    """
    outputs = trained_outputs(output)
    if not outputs:
        error: type[ConfigError] = NoGradientsError
        remedy = "train some of the parameters"
        if not tensors_of(output):
            error, remedy = ConfigError, "return tensors, or lists, tuples and dicts of them"
        raise error(
            f"no output of type {type(output).__name__} requires gradients, so that no training step can be measured",
            remedy=remedy,
        )
    scalars = [each for each in outputs if each.ndim == 0]
    losses = [each.real.float() for each in scalars] or [_cross_entropy(each) for each in outputs]
    return torch.stack(losses).sum()


def trained_outputs(output: Any) -> list[Tensor]:
    """Return the outputs from which backward can start: nonempty tensors that require gradients."""
    return [each for each in tensors_of(output) if each.requires_grad and each.numel() > 0]


def _cross_entropy(output: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension, with the first class as the target."""
    if output.is_nested:
        return torch.stack([_cross_entropy(each) for each in output.unbind()]).sum()
    scores = (output.abs() if output.is_complex() else output.float()).reshape(-1, output.shape[-1])
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def as_leaf(value: Any) -> Any:
    """Return a tensor detached from its history, which requires gradients as before; other values unchanged."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def clone(value: Any) -> Any:
    """Return a copy of a tensor; other values unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter; the CPU without parameters."""
    return next((each.device for each in module.parameters()), torch.device("cpu"))


def copy_network(model: nn.Module, place: str) -> nn.Module:
    """Return a copy of a network for training steps, with gradients of 0 where the network has any.

    Raises ConfigError, with the ``place``, for a network that cannot be copied.
    """
    results = [
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if any(each.grad_fn is not None for each in tensors_of(value))
    ]
    if results:  # autograd has no copies of them
        what = f"the network cannot be copied, because it keeps the results of operations in {join_names(results)}"
        raise ConfigError(what, place, "detach them, and use torch.nn.utils.parametrizations for weight norm")
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(f"the network cannot be copied: {truncate(error)}", place, "support copy.deepcopy") from error
    for mine, original in zip(copied.parameters(), model.parameters(), strict=True):
        if original.grad is not None:
            mine.grad = torch.zeros_like(original.grad)
    return copied


def own_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a network."""
    return [*model.parameters(), *model.buffers()]


def planner_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planner | None:
    """Return the plans for a forward pass, which runs; None if nothing can be recomputed."""
    budget = Budget(share=0.0)
    with Rematerializer(budget, parameters=own_of(model), existing=tensors_of((args, kwargs))):
        model(*args, **kwargs)
    planner: Planner | None = budget.limiter.planner(None)
    return planner


MAX_STEPS = 4  # until a budget has its final plan


def within_budget(
    model: nn.Module, budget: Budget, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Rematerializer:
    """Return a rematerializer whose next pass of these inputs follows the final plan for a budget; trains the model.

    Args:
    - `options`: of the rematerializer.

    Raises ConfigError if no step is within a limit in bytes.
    """
    rematerializer = Rematerializer(budget, parameters=own_of(model), existing=tensors_of((args, kwargs)), **options)
    if budget.has_limit:
        peak_of_step(model, rematerializer, args, kwargs)  # recorded
    if budget.peak_bytes is not None:
        for _ in range(MAX_STEPS):
            peak_of_step(model, rematerializer, args, kwargs)
            if not Measurement.finish():
                break
    return rematerializer


def peak_of_step(
    model: nn.Module,
    context: AbstractContextManager[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    log: StorageLog | None = None,
) -> int:
    """Run a training step, with forward in ``context``, and return the most bytes beyond those that existed before.

    Inputs are copied, as forward may overwrite them. The network has the gradients that it had before, whose values may
    change.
    """
    args, kwargs = tree_map(clone, tree_map(as_leaf, (args, kwargs)))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    log = log or StorageLog()
    gc.collect()
    with log:
        with context:
            output = model(*args, **kwargs)
        default_loss(output).backward()
    for parameter, gradient in gradients:
        parameter.grad = gradient
    return max(log.totals())
