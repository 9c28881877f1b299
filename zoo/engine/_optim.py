"""The optimizer of a run: its parameter groups and learning rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import nn

from zoo.config.optimizer import TIMM, WITH_MOMENTUM, Optimizer
from zoo.engine._layer_decay import layers_of
from zoo.errors import ConfigError
from zoo.models.classifier import classifier_parameters
from zoo.torch_internals.data import NormBase

NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm)  # the norms of this package are subclasses of the first


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters that require a gradient, each in exactly one group.

    ``initial_lr`` of a group is its base rate: ``learning_rate``, or for `classifier_parameters` ``classifier_lr``,
    unless that is -1. Each layer has ``layer_decay`` times the rate of the next one (`layers_of`). ``decay_norms``
    turns on weight decay of norms, ``decay_biases`` of other biases and vectors. Parameters that the method
    ``no_weight_decay`` of the model returns, as in networks of timm, are never decayed.

    Raises ConfigError if no parameter requires a gradient, for ``classifier_lr`` if none of them is the classifier's,
    and for an unknown optimizer or parameter of timm.
    """
    groups = _parameter_groups(model, settings)
    if not groups:
        raise ConfigError("no parameter requires a gradient", remedy="do not freeze the whole network")
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
    ids_of_classifier = set() if settings.classifier_lr == -1 else _ids_of_classifier(model, settings.classifier_lr)
    scales = _layer_scales(model, settings.layer_decay)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():  # yields a shared parameter once
        if not parameter.requires_grad:
            continue
        is_of_norm = id(parameter) in ids_of_norms
        is_vector = not is_of_norm and (name.rpartition(".")[2] == "bias" or parameter.ndim <= 1)
        without_decay = (is_of_norm and not settings.decay_norms) or (is_vector and not settings.decay_biases)
        decay = 0.0 if without_decay or name in never_decayed else settings.weight_decay
        lr = settings.classifier_lr if id(parameter) in ids_of_classifier else settings.learning_rate * scales[name]
        empty: dict[str, Any] = {"params": [], "lr": lr, "initial_lr": lr, "weight_decay": decay}
        groups.setdefault((lr, decay), empty)["params"].append(parameter)
    return list(groups.values())


def _layer_scales(model: nn.Module, decay: float) -> Mapping[str, float]:
    """Return the factor of the rate of each parameter; ConfigError if a decay finds a single layer."""
    if decay == 1:
        return defaultdict(lambda: 1.0)
    layers = layers_of(model)
    last = max(layers.values(), default=0)
    if last == 0:
        what = f"all parameters of {type(model).__name__} belong to one layer"
        remedy = "remove the key, or give the module a method group_matcher, as networks of timm have it"
        raise ConfigError(what, f"optimizer.layer_decay = {decay}", remedy)
    return {name: decay ** (last - layer) for name, layer in layers.items()}


def _ids_of_classifier(model: nn.Module, rate: float) -> set[int]:
    """Return the ids of the classifier's parameters that are trained; ConfigError if there are none."""
    ids = {id(parameter) for parameter in classifier_parameters(model) if parameter.requires_grad}
    if not ids:
        raise ConfigError(
            f"no trained parameter belongs to a known classifier of {type(model).__name__}",
            f"optimizer.classifier_lr = {rate}",
            "remove the key, or give the module a method get_classifier() that returns its last layer",
        )
    return ids


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every parameter group to ``factor`` times its initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
