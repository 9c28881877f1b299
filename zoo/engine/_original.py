"""Checkpoints of the trainer of the original project, mapillary/inplace_abn: `is_original` and `load_original`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.engine._consistency import ABSENT
from zoo.engine._state import TrainState
from zoo.errors import CheckpointError, escape, join_names, truncate
from zoo.weights._load import load_state_dict
from zoo.weights._read import extract_state_dict

KEYS = {"epoch", "state_dict", "best_prec1", "optimizer"}
CLASSIFIER = "fc"  # parameters with this in their name form the second group
# Entries of parameter groups that change during training, or that select an implementation.
NOT_SETTINGS = ("params", "lr", "fused", "foreach", "capturable", "differentiable", "maximize")


def is_original(content: Mapping[Any, Any]) -> bool:
    """Return whether this is the content of a checkpoint of the original trainer."""
    return content.keys() >= KEYS and content.keys().isdisjoint(("position", "format_version"))


def load_original(state: TrainState, saved: dict[str, Any], path: Path) -> list[str]:
    """Load the content of the file ``path`` into the state of a new run; return notices for the user.

    The state continues at the start of the next epoch, with the weights, the state of the optimizer and the best score
    of the file. A moving average starts from these weights. The file lacks the number of steps, which stays 0.

    Raises CheckpointError for another architecture or optimizer, WeightsError for other weights, and Python's errors
    for unexpected content.
    """
    arch, own_arch, epoch = saved.get("arch"), state.config.network.arch, saved["epoch"]
    if arch not in (None, own_arch):
        raise CheckpointError(
            f"the checkpoint is of {truncate(arch)}, this run trains {own_arch}",
            path,
            "set network.arch to its architecture",
        )
    if type(epoch) is not int or epoch < 0:
        raise ValueError(f"epoch = {epoch!r}")
    weights = extract_state_dict(saved, path)
    if load_state_dict(state.model, weights, source=escape(path)).classifier == "kept":
        raise CheckpointError("the checkpoint has another number of classes", path, "set network.classes to its number")
    _load_optimizer(state, saved["optimizer"], weights, path)
    if state.ema is not None:
        state.ema.load_state_dict(state.model.state_dict())
    state.epoch, state.best_score = epoch, float(saved["best_prec1"])
    return [
        f"resumed from {escape(path)}, a checkpoint of the original trainer: {epoch} of "
        f"{state.config.optimizer.schedule.epochs} epochs are done, best score {state.best_score:.2f} %",
        "the file has no random state, data, batch size or schedule to compare with this run: use the same settings; "
        "the order of the images differs",
    ]


def _load_optimizer(state: TrainState, saved: dict[str, Any], weights: Mapping[str, Tensor], path: Path) -> None:
    """Load the optimizer's state. In the file, it has the order of the network's parameters."""
    parameters = dict(state.model.named_parameters())
    names = [name for name in weights if name in parameters]
    groups = saved["param_groups"]
    if len(groups) == 2:  # with optimizer.classifier_lr
        names_of_groups = [[name for name in names if (CLASSIFIER in name) == second] for second in (False, True)]
    else:
        names_of_groups = [names]
    counts = [len(group["params"]) for group in groups]
    if counts != list(map(len, names_of_groups)):
        raise CheckpointError(
            f"the optimizer of the checkpoint has groups of {join_names(counts)} parameters, the network of "
            f"{join_names(map(len, names_of_groups))}",
            path,
            "give the settings of its run",
        )
    state_of, group_of = {}, {}
    for group, members in zip(groups, names_of_groups, strict=True):
        for key, name in zip(group["params"], members, strict=True):
            group_of[name] = group
            if key in saved["state"]:
                state_of[name] = saved["state"][key]

    # The order of this run's parameters may differ.
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    own_groups = state.optimizer.param_groups
    own_names = [[name_of[id(parameter)] for parameter in group["params"]] for group in own_groups]
    changes = {
        change
        for group, members in zip(own_groups, own_names, strict=True)
        for name in members
        for change in _changes(group_of[name], group)
    }
    if changes:
        raise CheckpointError(
            f"the checkpoint was written with other settings of the optimizer ({join_names(sorted(changes))})",
            path,
            "restore the settings, or start a new run from these weights with --weights and another --log-dir",
        )
    flat = [name for members in own_names for name in members]
    for name in state_of:
        _check_shapes(state_of[name], name, parameters[name])
    own = state.optimizer.state_dict()
    own["state"] = {index: state_of[name] for index, name in enumerate(flat) if name in state_of}
    state.optimizer.load_state_dict(own)


def _changes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of a parameter group that differ."""
    for key, value in saved.items():
        if key not in NOT_SETTINGS and own.get(key, ABSENT) != value:
            yield f"{truncate(key)}: {truncate(value)} before and {own.get(key, ABSENT)} now"


def _check_shapes(optimizer_state: Mapping[str, Any], name: str, parameter: Tensor) -> None:
    """Raise ValueError if the optimizer state belongs to another parameter."""
    for key, value in optimizer_state.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape != parameter.shape:
            raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
