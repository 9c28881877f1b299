"""Validates parsed JSON as an Experiment, and lists all problems."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from zoo.config.augmentation import AUGMENT_PARAMS
from zoo.config.experiment import Experiment
from zoo.config.optimizer import OPTIMIZER_PARAMS, SCHEDULE_PARAMS
from zoo.section import (
    MAX_PROBLEMS,
    UNKNOWN_KEY,
    KeyPath,
    Problem,
    Section,
    dotted,
    inner_section,
    problems_of,
    settings_of,
)

# Params -> the key beside them that determines what they are, so that a problem of the params involves that key.
TYPED: dict[KeyPath, tuple[str, dict[str, type[Section]]]] = {
    ("optimizer", "schedule", "params"): ("type", SCHEDULE_PARAMS),
    ("optimizer", "params"): ("type", OPTIMIZER_PARAMS),
    ("input", "augment_params_train"): ("augment_train", AUGMENT_PARAMS),
}

# Names of settings in other packages -> names here.
_SIZE = "input.crop_train (training) and input.crop_val with input.scale_val (validation)"
_SCHEDULE = "optimizer.schedule"
SYNONYMS = {
    **dict.fromkeys(("norm_layer", "norm_mode", "bn", "batch_norm"), "network.norm"),
    **dict.fromkeys(("act", "act_layer", "nonlinearity"), "network.activation"),
    **dict.fromkeys(("slope", "negative_slope", "alpha_elu"), "network.activation_param"),
    **dict.fromkeys(("n_classes", "nb_classes"), "network.num_classes"),
    **dict.fromkeys(("architecture", "model", "model_name", "backbone"), "network.arch"),
    **dict.fromkeys(("init", "initialization"), "network.weight_init"),
    **dict.fromkeys(("lr", "base_lr", "rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("wd", "decay", "l2"), "optimizer.weight_decay"),
    **dict.fromkeys(("batch", "bs", "batchsize"), "optimizer.batch_size"),
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_norm", "gradient_clip"), "optimizer.clip"),
    **dict.fromkeys(("smoothing",), "optimizer.label_smoothing"),
    **dict.fromkeys(("ema", "model_ema", "model_ema_decay"), "optimizer.ema_decay"),
    **dict.fromkeys(("model_ema_warmup",), "optimizer.ema_warmup"),
    **dict.fromkeys(("model_ema_steps",), "optimizer.ema_every"),
    **dict.fromkeys(("accumulation", "grad_accum", "grad_accumulation"), "optimizer.accumulate_steps"),
    **dict.fromkeys(("scheduler", "lr_schedule", "lr_scheduler", "sched"), f"{_SCHEDULE} (type, epochs, params)"),
    **dict.fromkeys(("num_epochs", "max_epochs"), f"{_SCHEDULE}.epochs"),
    **dict.fromkeys(("warmup", "warmup_lr"), f"{_SCHEDULE}.warmup_epochs"),
    **dict.fromkeys(("size", "image_size", "img_size", "resolution", "crop", "crop_size", "input_size"), _SIZE),
    **dict.fromkeys(("scale", "resize"), "input.scale_train (training) and input.scale_val (validation)"),
    **dict.fromkeys(("pad", "padding"), "input.pad_train"),
    **dict.fromkeys(("cutout", "cutout_length"), "input.cutout_train"),
    **dict.fromkeys(("color_jitter", "jitter"), "input.color_jitter_train"),
    **dict.fromkeys(("aa", "auto_augment", "auto_augment_policy"), "input.augment_train"),
    **dict.fromkeys(("reprob", "random_erase", "random_erasing"), "input.random_erasing_train"),
    **dict.fromkeys(("remode",), "input.random_erasing_mode_train"),
    **dict.fromkeys(("aug_repeats", "ra_reps"), "input.repeats_train"),
    **dict.fromkeys(("train_interpolation", "interpolation"), "input.interpolation_train"),
    **dict.fromkeys(("mixup_alpha",), "regularization.mixup"),
    **dict.fromkeys(("cutmix_alpha",), "regularization.cutmix"),
    **dict.fromkeys(("mixup_prob",), "regularization.mix_probability"),
    **dict.fromkeys(("mixup_switch_prob",), "regularization.switch_probability"),
    **dict.fromkeys(("mixup_off_epoch",), "regularization.mix_off_epoch"),
    **dict.fromkeys(("bce_loss",), 'regularization.loss "bce"'),
    **dict.fromkeys(("bce_target_thresh",), "regularization.bce_target_threshold"),
    **dict.fromkeys(("drop_path", "drop_path_rate", "stochastic_depth_prob"), "network.options.drop_path_rate"),
    **dict.fromkeys(("mixed_precision", "precision", "half", "fp16", "bf16"), "training.amp"),
    **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
}


def validate(content: dict[str, Any]) -> tuple[Experiment | None, list[Problem]]:
    """Return the experiment for ``content`` (None if it is invalid) and all problems.

    pydantic validates combinations only if each value is valid by itself. Invalid values are therefore removed and the
    rest is validated again, until no problem remains or nothing can be removed. Problems that involve a removed value
    are not reported.
    """
    remaining = copy.deepcopy(content)
    problems: list[Problem] = []
    cuts: list[KeyPath] = []
    while True:
        try:
            experiment = Experiment.model_validate(remaining)
        except ValidationError as error:
            new_problems = list(_problems_of(error, remaining))
            problems += [problem for problem in new_problems if not _involves(problem, cuts)]
            blamed = [path for problem in new_problems for path in _blamed(problem)]
            removed = [_cut(remaining, path) for path in blamed]
            if not any(removed):
                return None, problems
            cuts += blamed
        else:
            return (None if problems else experiment), problems


def _involves(problem: Problem, cuts: list[KeyPath]) -> bool:
    paths = (problem.path, *problem.involved)
    return any(path[: len(cut)] == cut[: len(path)] for path in paths for cut in cuts)


def _blamed(problem: Problem) -> tuple[KeyPath, ...]:
    """Return the smallest paths whose removal resolves ``problem``."""
    params = _params_of(problem.path)
    if params is not None:
        return params, _type_of(params)
    return (problem.path[:-1] or problem.path,) if problem.involved else (problem.path,)


def _params_of(path: KeyPath) -> KeyPath | None:
    """Return the params of `TYPED` that the path leads into, or None."""
    return next((params for params in TYPED if path[: len(params)] == params), None)


def _type_of(params: KeyPath) -> KeyPath:
    """Return the path of the key that determines what ``params`` are."""
    return (*params[:-1], TYPED[params][0])


def _cut(content: dict[str, Any], path: KeyPath) -> bool:
    """Remove the value at ``path`` (for a list element, the whole list); return whether it existed."""
    node: Any = content
    for key, next_key in zip(path, (*path[1:], 0), strict=True):
        if not isinstance(node, dict) or key not in node:
            return False
        if isinstance(next_key, int):
            del node[key]
            return True
        node = node[key]
    return False


def _problems_of(error: ValidationError, content: dict[str, Any]) -> Iterator[Problem]:
    for index, problem in enumerate(problems_of(error)):
        if problem.message == UNKNOWN_KEY and index < MAX_PROBLEMS:  # no more are printed, and suggestions take time
            problem = replace(problem, message=_unknown_key(problem.path, content))
        params = _params_of(problem.path)
        if params is not None and not problem.involved:
            problem = replace(problem, involved=(_type_of(params),))
        yield problem


def _unknown_key(path: KeyPath, content: dict[str, Any]) -> str:
    """Return a message for an unknown key that suggests its name here, its section, or similar keys."""
    key = str(path[-1])
    params = _params_of(path)
    if params is not None:
        type_key, kinds = TYPED[params]
        section: Any = content
        for each in params[:-1]:
            section = section[each]
        kind = section.get(type_key, section_at(params[:-1]).model_fields[type_key].default)
        known = list(kinds[kind].model_fields)
        if not known:
            return f"unknown key: a {kind} {params[-2]} has no params"
    else:
        known = list(settings_of(section_at(path[:-1])))
    if key.lower() in SYNONYMS:
        return f"unknown key; it is called {SYNONYMS[key.lower()]}"
    elsewhere = [place for place in _places() if place.rpartition(".")[2] == key]
    if elsewhere:
        return f"unknown key; its place is {' or '.join(elsewhere)}"
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f'unknown key; the nearest known key is "{near[0]}"'
    far = difflib.get_close_matches(key, [place.rpartition(".")[2] for place in _places()], n=1, cutoff=0.8)
    hint = next((f", or {place}" for place in _places() if place.rpartition(".")[2] in far), "")
    where = f"of {dotted(path[:-1])}" if path[:-1] else "of the top level"
    return f"unknown key; the keys {where} are {', '.join(known)}{hint}"


def section_at(path: KeyPath) -> type[BaseModel]:
    """Return the section at ``path``; keys that are not fields are keys of a dict of sections."""
    section: type[BaseModel] = Experiment
    for key in path:
        if key in section.model_fields:
            section = inner_section(section.model_fields[str(key)].annotation) or section
    return section


@cache
def _places() -> list[str]:
    """Return the dotted paths of all settings of a run."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for key, field in settings_of(section).items():
            inner = inner_section(field.annotation)
            if inner is None:
                yield prefix + key
            elif key != "expected":
                yield from walk(inner, f"{prefix}{key}.")

    return list(walk(Experiment, ""))
