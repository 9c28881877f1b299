"""The optimizer of a run: its parameter groups and gradient clipping."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from zoo.config import Optimizer
from zoo.config.optimizer import TIMM, WITH_MOMENTUM
from zoo.errors import ConfigError
from zoo.models.base import WITH_PREVIOUS
from zoo.torch_internals import NormBase

AGC_EPS = 1e-3
CLASSIFIER = re.compile(r"(?:.*\.)?(?:fc|head\.projection)\.")  # names of its parameters
NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm)  # the norms of this package are subclasses of the first


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters that require a gradient, each in exactly one group.

    Every group has its base rate as ``initial_lr``: ``learning_rate``, or ``classifier_lr``, unless that is -1, for
    parameters of a classifier (`CLASSIFIER`), times ``layer_decay`` for each layer behind it. ``decay_norms`` and
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
    params = settings.params.model_dump()
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
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
            groups, name, settings.learning_rate, 0.0, settings.momentum, **settings.params.model_dump()
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
        lr = (
            settings.classifier_lr
            if settings.classifier_lr != -1 and CLASSIFIER.match(name)
            else settings.learning_rate
        )
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
    """Return the norm of each row of a weight (of the whole of a vector), in a shape that broadcasts to x."""
    norm = torch.linalg.vector_norm
    return norm(x) if x.ndim <= 1 else norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every parameter group to ``factor`` times its initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
