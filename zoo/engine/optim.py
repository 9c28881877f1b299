"""The optimizer of a run and its learning rate schedule.

The learning rate is a pure function of the position in training, so checkpoints do not need it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config import MIN_LINEAR_LR, Optimizer, Schedule
from zoo.config.optimizer import TIMM, WITH_MOMENTUM
from zoo.errors import ConfigError
from zoo.models.base import WITH_PREVIOUS
from zoo.torch_internals import NormBase

AGC_EPS = 1e-3
NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm)  # the norms of this package are subclasses of the first


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters that require a gradient, each in exactly one group.

    Every group has its base rate as ``initial_lr``: ``learning_rate``, or ``classifier_lr``, unless that is -1, for
    parameters with "fc" in the name, times ``layer_decay`` for each layer behind it. ``decay_norms`` and
    ``decay_biases`` turn weight decay of norms and of other biases and vectors on. The parameters that the method
    ``no_weight_decay`` of the model names, as networks of timm have it, are never decayed.

    Raises ConfigError if no parameter requires a gradient, for an unknown optimizer or parameter of timm, and for a
    layer decay of a model without ``group_matcher``.
    """
    groups = _parameter_groups(model, settings)
    if not groups:
        raise ConfigError("no parameter requires a gradient; the network: do not freeze all of it")
    if settings.type.startswith(TIMM):
        return _timm_optimizer(groups, settings)
    optimizer = getattr(torch.optim, settings.type)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.params.items()}
    if settings.type in WITH_MOMENTUM:
        options["momentum"] = settings.momentum
    if settings.type == "SGD":
        options["nesterov"] = settings.nesterov
    if "fused" in signature(optimizer).parameters:
        # With a fused optimizer the gradient scaler of fp16 decides on the device whether to step, without asking the
        # host.
        options["fused"] = all(parameter.is_cuda for group in groups for parameter in group["params"])
    built: torch.optim.Optimizer = optimizer(groups, lr=settings.learning_rate, **options)
    return built


def _timm_optimizer(groups: list[dict[str, Any]], settings: Optimizer) -> torch.optim.Optimizer:
    name = settings.type.removeprefix(TIMM)
    try:
        create = import_module("timm.optim").create_optimizer_v2
        built: torch.optim.Optimizer = create(
            groups, name, settings.learning_rate, 0.0, settings.momentum, **settings.params
        )
    except (ImportError, ValueError, TypeError, AssertionError) as error:
        what = f"the optimizer {name} of timm cannot be built: {error}"
        raise ConfigError(what, "optimizer.type", "see timm.optim.list_optimizers()") from error
    return built


def _parameter_groups(model: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    ids_of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    names_of: Callable[[], Iterable[str]] = getattr(model, "no_weight_decay", tuple)
    never_decayed = set(names_of())
    layers = {} if settings.layer_decay == 1 else layers_of(model)
    last = max(layers.values(), default=0)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():  # yields a shared parameter once
        if not parameter.requires_grad:
            continue
        is_of_norm = id(parameter) in ids_of_norms
        is_vector = not is_of_norm and (name.rpartition(".")[2] == "bias" or parameter.ndim <= 1)
        without_decay = (is_of_norm and not settings.decay_norms) or (is_vector and not settings.decay_biases)
        decay = 0.0 if without_decay or name in never_decayed else settings.weight_decay
        lr = settings.classifier_lr if settings.classifier_lr != -1 and "fc" in name else settings.learning_rate
        if layers:
            lr *= settings.layer_decay ** (last - layers[name])
        empty: dict[str, Any] = {"params": [], "lr": lr, "initial_lr": lr, "weight_decay": decay}
        groups.setdefault((lr, decay), empty)["params"].append(parameter)
    return list(groups.values())


def layers_of(model: nn.Module) -> dict[str, int]:
    """Return the number of the layer of each parameter, by name, counted from the input.

    The method ``group_matcher`` of the model returns, as in timm, a function from names to places, or regular
    expressions by group of layers: one, or several with a suffix each. The place of a name are the number of the group,
    the numbers that the expression captures, and the suffix. Names that nothing matches come last.
    """
    group_matcher: Callable[..., Any] | None = getattr(model, "group_matcher", None)
    if group_matcher is None:
        raise ConfigError(
            f"{type(model).__name__} has no method group_matcher, which names its layers",
            "optimizer.layer_decay",
            "remove the key, or use a network of this package or of timm",
        )
    matcher = group_matcher(coarse=False)
    place_of = _place_by_function(matcher) if callable(matcher) else _place_by_expressions(matcher)
    places = {name: place_of(name) for name, _ in model.named_parameters()}
    layer = 0
    order: dict[tuple[float, ...], int] = {}
    for place in sorted(set(places.values())):
        layer += bool(order) and place[-1] != WITH_PREVIOUS[0]
        order[place] = layer
    return {name: order[place] for name, place in places.items()}


def _place_by_function(matcher: Callable[[str], Any]) -> Callable[[str], tuple[float, ...]]:
    def place(name: str) -> tuple[float, ...]:
        found = matcher(name)
        return tuple(map(float, found)) if isinstance(found, (tuple, list)) else (float(found),)

    return place


def _place_by_expressions(matcher: Mapping[str, Any]) -> Callable[[str], tuple[float, ...]]:
    expressions = [
        (re.compile(expression), number, suffix or ())
        for number, group in enumerate(matcher.values())
        if group is not None
        for expression, suffix in ([(group, None)] if isinstance(group, str) else group)
    ]

    def place(name: str) -> tuple[float, ...]:
        for expression, number, suffix in expressions:
            if match := expression.match(name):
                return tuple(map(float, (number, *filter(None, match.groups()), *suffix)))
        return (math.inf,)

    return place


def clip_gradients(parameters: Iterable[nn.Parameter], clip: float, mode: str) -> None:
    """Clip gradients in place, see the settings ``optimizer.clip`` and ``optimizer.clip_mode``.

    Mode "agc" is adaptive gradient clipping (Brock et al., High-Performance Large-Scale Image Recognition Without
    Normalization, ICML 2021, equation 3), with the lower bound 1e-3 of the norms of weights.
    """
    parameters = list(parameters)
    if mode == "norm":
        nn.utils.clip_grad_norm_(parameters, clip)
    elif mode == "value":
        nn.utils.clip_grad_value_(parameters, clip)
    else:
        for parameter in parameters:
            if parameter.grad is not None:
                largest = clip * _norm_of_units(parameter.detach()).clamp(min=AGC_EPS)
                norm = _norm_of_units(parameter.grad)
                parameter.grad.mul_(torch.where(norm > largest, largest / norm, 1.0))


def _norm_of_units(x: Tensor) -> Tensor:
    """Return the norm of each row of a weight (of the whole of a vector), in a shape that broadcasts to that of x."""
    norm = torch.linalg.vector_norm
    return norm(x) if x.ndim <= 1 else norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)


def lr_factor(schedule: Schedule, epoch: int, step_in_epoch: int, steps_per_epoch: int, base_lr: float) -> float:
    """Return the factor of the base learning rate in this step; epochs and steps count from 0.

    With t = epoch (mode "epoch") or t = epoch * steps_per_epoch + step_in_epoch (mode "step") the types are:

    - constant: 1
    - step: gamma^(t // step_size)
    - multistep: gamma^n, where n is the number of milestones <= t
    - exponential: gamma^t
    - linear: alpha t + beta, but never below MIN_LINEAR_LR / base_lr, the end of the published decay (CVPR 2018,
      section 4.1); with the published alpha and beta alone it would fall below zero
    - cosine: from m at the start of each cycle to e = end_factor along half a cosine, e + (m - e) (1 + cos(pi u)) / 2,
      where u is the completed fraction of the cycle, and m = cycle_factor^n in cycle n
    - one-cycle: along half a cosine from start_factor to 1 in the first ``rise`` of all steps but the last, and along
      another to end_factor at the last, as torch's OneCycleLR
    - triangle: (t + 1) / p up to 1 at p = peak_epoch * steps_per_epoch, then linearly to 0 at the last step (EURASIP
      JIVP 2023:1, section 5, interpolated as in its public code)
    - polynomial: (1 - t / t_end)^power, where t_end is the end of training (CVPR 2018, section 4.2, with mode "step")

    During the first ``warmup_epochs`` the factor is multiplied by the fraction of the warm-up completed by this step.
    With ``warmup_start`` it rises linearly in t from there to 1 instead. With ``decay_after_warmup``, t and the end of
    training then count from the end of the warm-up.
    """
    step = epoch * steps_per_epoch + step_in_epoch
    t, t_end, unit = float(step), float(schedule.epochs * steps_per_epoch), float(steps_per_epoch)
    if schedule.mode == "epoch":
        t, t_end, unit = float(epoch), float(schedule.epochs), 1.0
    warmup = schedule.warmup_epochs * unit
    if schedule.warmup_start is not None:
        if t < warmup:
            return schedule.warmup_start + (1 - schedule.warmup_start) * t / warmup
        if schedule.decay_after_warmup:
            t, t_end = t - warmup, t_end - warmup
    factor = _decay(schedule, t, t_end, unit)
    if schedule.type == "linear":
        factor = max(factor, MIN_LINEAR_LR / base_lr)
    warmup_steps = schedule.warmup_epochs * steps_per_epoch
    if warmup_steps == 0 or schedule.warmup_start is not None:
        return factor
    return factor * min(1.0, (step + 1) / warmup_steps)


def _decay(schedule: Schedule, t: float, t_end: float, unit: float) -> float:
    """Return the factor without warm-up at t of t_end, where an epoch is ``unit`` long."""
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
        cycle, u = divmod(t * params["cycles"] / t_end, 1)
        return _anneal(params["cycle_factor"] ** cycle, params["end_factor"], u)
    if schedule.type == "one-cycle":
        peak, last = params["rise"] * t_end - 1, t_end - 1
        if t <= peak:
            return _anneal(params["start_factor"], 1.0, t / peak)
        return _anneal(1.0, params["end_factor"], (t - peak) / (last - peak))
    if schedule.type == "polynomial":
        return float((1 - t / t_end) ** params["power"])
    if schedule.type == "triangle":
        epoch, peak_epoch = (t + 1) / unit, params["peak_epoch"]
        return float(min(epoch / peak_epoch, (schedule.epochs - epoch) / (schedule.epochs - peak_epoch)))
    return 1.0


def _anneal(start: float, end: float, fraction: float) -> float:
    """Return the value at a fraction of half a cosine from start to end."""
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2


def _power(gamma: float, exponent: float) -> float:
    """Return the power, or infinity on overflow; the loss of that step then ends the training."""
    try:
        return float(gamma**exponent)
    except OverflowError:
        return math.inf


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every parameter group to ``factor`` times its initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
