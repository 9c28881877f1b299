"""Turns parsed JSON into an Experiment, or into the list of everything that is wrong with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zoo.config.experiment import Experiment
from zoo.config.optimizer import SCHEDULE_PARAMS
from zoo.config.section import ABSENT, Conflicts, KeyPath, Problem
from zoo.errors import nearest

# The schedule's params are read as its type says, so a complaint about them rests on the type.
SCHEDULE_TYPE: KeyPath = ("optimizer", "schedule", "type")
SCHEDULE_PARAMS_PATH: KeyPath = ("optimizer", "schedule", "params")


def validate(content: dict[str, Any]) -> tuple[Experiment | None, list[Problem]]:
    """Return the experiment that ``content`` describes (None if it is wrong) and all problems of ``content``.

    Combinations are checked only once each value is right by itself. So what is wrong is cut out and the rest
    checked again, until nothing is wrong or left to cut; complaints that rest on a cut value do not count.
    """
    remaining = copy.deepcopy(content)
    problems: list[Problem] = []
    cuts: list[KeyPath] = []
    while True:
        try:
            experiment = Experiment.model_validate(remaining)
        except ValidationError as error:
            found = list(_problems_of(error, remaining))
            problems += [problem for problem in found if not _rests_on(problem, cuts)]
            blamed = [path for problem in found for path in _blamed(problem)]
            removed = [_cut(remaining, path) for path in blamed]
            if not any(removed):
                return None, problems
            cuts += blamed
        else:
            return (None if problems else experiment), problems


def _rests_on(problem: Problem, cuts: list[KeyPath]) -> bool:
    paths = (problem.path, *problem.involved)
    return any(path[: len(cut)] == cut[: len(path)] for path in paths for cut in cuts)


def _blamed(problem: Problem) -> tuple[KeyPath, ...]:
    """Return what to cut out so that ``problem`` goes away and as much as possible is still checked."""
    if problem.path[:3] == SCHEDULE_PARAMS_PATH:
        return SCHEDULE_PARAMS_PATH, SCHEDULE_TYPE
    return (problem.path[:-1],) if problem.involved else (problem.path,)


def _cut(content: dict[str, Any], path: KeyPath) -> bool:
    """Remove what is at ``path`` (the whole list, if that is inside one); return whether anything was."""
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
    for details in error.errors():
        path = tuple(part for part in details["loc"] if part != "[key]")  # pydantic marks wrong keys so
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Conflicts):
            for problem in cause.problems:
                involved = tuple(path + other for other in problem.involved)
                yield Problem(path + problem.path, problem.value, problem.message, involved)
        else:
            involved = (SCHEDULE_TYPE,) if path[:3] == SCHEDULE_PARAMS_PATH else ()
            yield Problem(path, *_value_and_message(path, details, content), involved)


def _value_and_message(path: KeyPath, details: ErrorDetails, content: dict[str, Any]) -> tuple[Any, str]:
    value = details["input"]
    if details["type"] == "missing":
        return ABSENT, "is missing"
    if details["type"] == "extra_forbidden":
        return value, _unknown_key(path, content)
    if details["type"] in ("model_type", "dict_type"):
        return value, "should be a JSON object"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return value, message[0].lower() + message[1:]


def _unknown_key(path: KeyPath, content: dict[str, Any]) -> str:
    if path[:-1] == SCHEDULE_PARAMS_PATH:
        kind = content["optimizer"]["schedule"].get("type", "constant")
        known = list(SCHEDULE_PARAMS[kind].model_fields)
        if not known:
            return f"unknown key: a {kind} schedule has no params"
    else:
        known = _known_keys(path[:-1])
    return f'unknown key; the nearest known key is "{nearest(str(path[-1]), known, 1)[0]}"'


def _known_keys(section_path: KeyPath) -> list[str]:
    """Return the keys that the section of an experiment at ``section_path`` may hold."""
    section: type[BaseModel] = Experiment
    for key in section_path:
        if key in section.model_fields:
            annotation = section.model_fields[str(key)].annotation
            choices = (annotation, *get_args(annotation))  # Expected | None, dict[Protocol, Score]
            section = next(c for c in choices if isinstance(c, type) and issubclass(c, BaseModel))
    return list(section.model_fields)
