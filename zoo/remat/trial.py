"""A training step without side effects, which `zoo.check`, `zoo.memory_report` and planning run before training.

Tested by tests/remat/test_trial.py and tests/remat/test_planning.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zoo.errors import ConfigError
from zoo.ops.context import restored_buffers
from zoo.remat.effects import PythonState
from zoo.torch_internals.data import is_same_view, tensors_of


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


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Return a context that restores on exit what forward and backward may change, except the values of parameters.

    It restores buffers, the memory and the gradients of parameters, random number generators, and the state that
    `PythonState` finds in attributes and hooks. The generators are the global ones of torch, numpy and Python's
    `random`, and all that attributes refer to. Attributes of lazy modules are not restored, because their first call
    creates parameters.
    """
    parameters = [(each, each.detach(), each.grad) for each in module.parameters() if not is_lazy(each)]
    devices = {each.device for each in module.parameters() if each.device.type == "cuda"}
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(devices)), restored_buffers(module):
        state = None if any(map(is_lazy, (*module.parameters(), *module.buffers()))) else PythonState(module)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if state is not None:
                state.restore()
            for parameter, memory, gradient in parameters:
                parameter.grad = gradient
                if not is_same_view(parameter, memory):
                    parameter.data = memory
