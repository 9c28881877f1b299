"""A training step that leaves nothing behind: what `zoo.check`, the report and planning run before training.

Tested by tests/remat/test_trial.py and tests/remat/test_planning.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ConfigError
from zoo.ops.context import restored_buffers
from zoo.torch_internals.data import tensors_of, tree_leaves


class NoGradientsError(ConfigError):
    """No output of a call requires gradients."""


def default_loss(output: Any) -> Tensor:
    """Return the sum of the scalar outputs, which are losses, or if there are none the cross-entropy of the outputs.

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
    """Return the outputs from which a training step can start."""
    return [each for each in tensors_of(output) if each.requires_grad and each.numel() > 0]


def _cross_entropy(output: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension, with the first class as the target."""
    if output.is_nested:
        return torch.stack([_cross_entropy(each) for each in output.unbind()]).sum()
    scores = (output.abs() if output.is_complex() else output.float()).reshape(-1, output.shape[-1])
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def as_leaf(value: Any) -> Any:
    """Return a tensor without its history; other values unchanged."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def clone(value: Any) -> Any:
    """Return a copy of a tensor; other values unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter; the CPU without parameters."""
    return next((each.device for each in module.parameters()), torch.device("cpu"))


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Return a context that restores buffers and random number generators at its end.

    The generators are the global ones of torch, numpy and Python's `random`, and all that are attributes of submodules.
    """
    devices = {each.device for each in module.parameters() if each.device.type == "cuda"}
    values = (leaf for owner in module.modules() for leaf in tree_leaves(vars(owner)))
    rewinds = [rewind for each in values if (rewind := _rewind_of(each)) is not None]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(devices)), restored_buffers(module):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for rewind in rewinds:
                rewind()


def _rewind_of(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the present state of a random number generator; None for another value."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
