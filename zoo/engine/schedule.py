"""The learning rate as a pure function of the position in training: nothing to save, nothing to resume."""

from __future__ import annotations

import math
from bisect import bisect_right

import torch

from zoo.config import MIN_LINEAR_LR, Schedule


def lr_factor(schedule: Schedule, epoch: int, step_in_epoch: int, steps_per_epoch: int, base_lr: float) -> float:
    """Return what the base rate is multiplied with in this step (epochs and steps count from 0).

    With t = epoch (mode "epoch") or t = epoch * steps_per_epoch + step_in_epoch (mode "step"):
    constant 1; step gamma^(t // step_size); multistep gamma^(milestones <= t); exponential gamma^t;
    linear alpha t + beta, but never below MIN_LINEAR_LR / base_lr, the end of the published decay (CVPR 2018,
    section 4.1; the published settings alone would go below zero); cosine (1 + cos(pi t / t_end)) / 2 with
    t_end the end of training; triangle (t + 1) / p up to 1 at p = peak_epoch * steps_per_epoch, then in a line to 0
    in the last step (EURASIP JIVP 2023:1, section 5, interpolated as its public code does). During the first
    ``warmup_epochs`` it is also multiplied with the fraction of the warm-up done after this step.
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
    if schedule.type == "cosine":
        t_end = schedule.epochs * (1 if schedule.mode == "epoch" else steps_per_epoch)
        return (1 + math.cos(math.pi * t / t_end)) / 2
    if schedule.type == "triangle":
        epoch, peak_epoch = (t + 1) / steps_per_epoch, params["peak_epoch"]
        return float(min(epoch / peak_epoch, (schedule.epochs - epoch) / (schedule.epochs - peak_epoch)))
    return 1.0


def _power(gamma: float, exponent: int) -> float:
    """Return the power, infinity where it is larger than all numbers: the loss that follows then ends the training."""
    try:
        return float(gamma**exponent)
    except OverflowError:
        return math.inf


def clamp_notice(schedule: Schedule, steps_per_epoch: int, base_lr: float) -> str | None:
    """Return a sentence about the clamp of a linear schedule that would end below MIN_LINEAR_LR, else None."""
    t_end = schedule.epochs * (1 if schedule.mode == "epoch" else steps_per_epoch)
    if schedule.type != "linear" or (last := base_lr * _decay(schedule, t_end - 1, 1)) >= MIN_LINEAR_LR:
        return None
    return (
        f"linear schedule: the rate is held at {MIN_LINEAR_LR:g}, where alpha and beta alone would take it "
        f"to {last:g} at the end of training"
    )


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the rate of every parameter group to ``factor`` times its own initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
