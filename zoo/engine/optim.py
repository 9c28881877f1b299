"""The optimizer of a run, with its parameters in groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zoo.config import Optimizer
from zoo.errors import ConfigError

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)  # the zoo's own norms are of the first class


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return the SGD or Adam optimizer of all parameters that want a gradient, each in exactly one group.

    Parameters with "fc" in the name have ``classifier_lr`` unless that is -1; with ``decay_norms`` off scales
    and shifts of norms have no weight decay, with ``decay_biases`` off the biases of other layers. Adam takes its
    rate and weight decay from the settings, nothing else. Every group keeps its rate as ``initial_lr``.
    ConfigError: there is nothing to train.
    """
    groups = _parameter_groups(model, settings)
    if not groups:
        raise ConfigError("no parameter wants a gradient; the network: leave some of it to be trained")
    # Fused: the gradient scaler of fp16 then decides on the device whether to step, without asking the host.
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    if settings.type == "Adam":
        return torch.optim.Adam(groups, lr=settings.learning_rate, fused=fused)
    return torch.optim.SGD(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        fused=fused,
    )


def _parameter_groups(model: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter, of_norm in _trainable(model):
        lr = settings.learning_rate
        if settings.classifier_lr != -1 and "fc" in name:
            lr = settings.classifier_lr
        of_bias = not of_norm and name.rpartition(".")[2] == "bias"
        spared = (of_norm and not settings.decay_norms) or (of_bias and not settings.decay_biases)
        decay = 0.0 if spared else settings.weight_decay
        empty: dict[str, Any] = {"params": [], "lr": lr, "initial_lr": lr, "weight_decay": decay}
        groups.setdefault((lr, decay), empty)["params"].append(parameter)
    return list(groups.values())


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield name, parameter and whether a norm owns it; a shared parameter comes once."""
    of_norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, NORMS)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, id(parameter) in of_norms
