"""The optimizer of a run and its learning rate schedule.

The learning rate is a pure function of the position in training, so checkpoints do not need it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

import torch
from torch import nn

from zoo.config import MIN_LINEAR_LR, Optimizer, Schedule
from zoo.errors import ConfigError
from zoo.torch_internals import NormBase

ENDING_TYPES = ("cosine", "triangle", "polynomial")  # schedules that depend on the number of epochs
NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm)  # the norms of this package are subclasses of the first


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return the SGD or Adam optimizer of all parameters that require a gradient, each in exactly one group.

    Parameters with "fc" in the name have the learning rate ``classifier_lr`` unless that is -1. ``decay_norms`` and
    ``decay_biases`` turn weight decay of norms and of other biases on. Every group has its base rate as ``initial_lr``.
    Raises ConfigError if no parameter requires a gradient.
    """
    groups = _parameter_groups(model, settings)
    if not groups:
        raise ConfigError("no parameter requires a gradient; the network: do not freeze all of it")
    # With a fused optimizer the gradient scaler of fp16 decides on the device whether to step, without asking the host.
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
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    ids_of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():  # yields a shared parameter once
        if not parameter.requires_grad:
            continue
        is_of_norm = id(parameter) in ids_of_norms
        is_bias = not is_of_norm and name.rpartition(".")[2] == "bias"
        without_decay = (is_of_norm and not settings.decay_norms) or (is_bias and not settings.decay_biases)
        decay = 0.0 if without_decay else settings.weight_decay
        lr = settings.classifier_lr if settings.classifier_lr != -1 and "fc" in name else settings.learning_rate
        empty: dict[str, Any] = {"params": [], "lr": lr, "initial_lr": lr, "weight_decay": decay}
        groups.setdefault((lr, decay), empty)["params"].append(parameter)
    return list(groups.values())


def lr_factor(schedule: Schedule, epoch: int, step_in_epoch: int, steps_per_epoch: int, base_lr: float) -> float:
    """Return the factor of the base learning rate in this step; epochs and steps count from 0.

    With t = epoch (mode "epoch") or t = epoch * steps_per_epoch + step_in_epoch (mode "step") the types are:

    - constant: 1
    - step: gamma^(t // step_size)
    - multistep: gamma^n, where n is the number of milestones <= t
    - exponential: gamma^t
    - linear: alpha t + beta, but never below MIN_LINEAR_LR / base_lr, the end of the published decay (CVPR 2018,
      section 4.1); with the published alpha and beta alone it would fall below zero
    - cosine: (1 + cos(pi t / t_end)) / 2, where t_end is the end of training
    - triangle: (t + 1) / p up to 1 at p = peak_epoch * steps_per_epoch, then linearly to 0 at the last step (EURASIP
      JIVP 2023:1, section 5, interpolated as in its public code)
    - polynomial: (1 - t / t_end)^power, where t_end is the end of training (CVPR 2018, section 4.2, with mode "step")

    During the first ``warmup_epochs`` the factor is multiplied by the fraction of the warm-up completed by this step.
    """
    step = epoch * steps_per_epoch + step_in_epoch
    t = epoch if schedule.mode == "epoch" else step
    factor = _decay(schedule, t, steps_per_epoch)
    if schedule.type == "linear":
        factor = max(factor, MIN_LINEAR_LR / base_lr)
    warmup_steps = schedule.warmup_epochs * steps_per_epoch
    return factor * min(1.0, (step + 1) / warmup_steps) if warmup_steps else factor


def _decay(schedule: Schedule, t: int, steps_per_epoch: int) -> float:
    params = schedule.params
    gamma = params.get("gamma", 0.1)
    if schedule.type == "step":
        return _power(gamma, t // params["step_size"])
    if schedule.type == "multistep":
        return _power(gamma, bisect_right(params["milestones"], t))
    if schedule.type == "exponential":
        return _power(gamma, t)
    if schedule.type == "linear":
        return float(params["alpha"] * t + params["beta"])
    t_end = schedule.epochs * (1 if schedule.mode == "epoch" else steps_per_epoch)
    if schedule.type == "cosine":
        return (1 + math.cos(math.pi * t / t_end)) / 2
    if schedule.type == "polynomial":
        return float((1 - t / t_end) ** params["power"])
    if schedule.type == "triangle":
        epoch, peak_epoch = (t + 1) / steps_per_epoch, params["peak_epoch"]
        return float(min(epoch / peak_epoch, (schedule.epochs - epoch) / (schedule.epochs - peak_epoch)))
    return 1.0


def _power(gamma: float, exponent: int) -> float:
    """Return the power, or infinity on overflow; the loss of that step then ends the training."""
    try:
        return float(gamma**exponent)
    except OverflowError:
        return math.inf


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every parameter group to ``factor`` times its initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
