"""Reads experiment files and reports everything that is wrong with one of them at once."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zoo.config.experiment import Experiment
from zoo.config.section import KeyPath, Problem, dotted
from zoo.config.validate import validate
from zoo.errors import ConfigError, nearest, printable

logger = logging.getLogger("zoo")

MAX_PROBLEMS = 20  # so many are printed, the others counted
MAX_DEPTH = 16  # an experiment has five levels
MAX_VALUES = 10_000  # an experiment has some sixty


def experiments_dir() -> Path:
    """Return the folder of the experiment files: in an installed package, else in the source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"


def load_experiment(path: str | Path) -> Experiment:
    """Return the experiment in the JSON file at ``path``; files of the original project are read unchanged.

    Raises ConfigError, which names every problem of the file with its place and value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=_JsonObject)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of an experiment file, "
            f"for instance of one in {experiments_dir()}"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: {error.msg} (strict JSON: no comments, no trailing commas)"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8; numbers or nesting beyond Python's limits
        raise ConfigError(f"{path}: is not a JSON file ({error})") from None
    return parse_experiment(content, str(path))


def find_experiment(name_or_path: str) -> Experiment:
    """Return the experiment in a JSON file, or the bundled one of that name, with ``.json`` or without.

    Raises ConfigError, which for a name that no bundled file has names the nearest.
    """
    bundled = {path.stem: path for path in sorted(experiments_dir().glob("*.json"))}
    if os.path.exists(name_or_path):
        return load_experiment(name_or_path)
    name = name_or_path.removesuffix(".json")
    if name in bundled:
        return load_experiment(bundled[name])
    if os.sep in name:
        return load_experiment(name_or_path)  # which says that there is no such file
    raise ConfigError(
        f"no experiment is called {printable(name_or_path)!r}; give the path of an experiment file or the name of a "
        f"bundled one, the nearest are {', '.join(nearest(name, bundled))}"
    )


def parse_experiment(content: dict[str, Any], source: str) -> Experiment:
    """Return the experiment that ``content``, the parsed JSON, describes; ``source`` names it in messages.

    A 3x3 stem asked of a WiderResNet, as in a published file, is accepted and logged: it has no effect there.
    Raises ConfigError with one line per problem.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: should hold a JSON object, not a {type(content).__name__}")
    _check_extent(content, source)
    experiment, problems = validate(content)
    problems = [*_repeated_keys(content), *problems]
    if experiment is None or problems:
        lines = [f"{source}: {problem}" for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"{source}: and {len(problems) - MAX_PROBLEMS:,} more problems")
        raise ConfigError("\n".join(lines))
    if experiment.network.input_3x3 and experiment.network.arch.startswith("wider"):
        logger.info("%s: network.input_3x3 = true: is ignored, a WiderResNet has no other stem", source)
    return experiment


class _JsonObject(dict[str, Any]):
    """A JSON object that remembers which keys it was given more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def _check_extent(content: dict[str, Any], source: str) -> None:
    """Raise ConfigError for what is nested too deeply, a list that contains itself too, or holds too many values.

    It runs before everything that calls itself for what is inside. A value that is in several places, as a checkpoint
    can have it, counts in each of them.
    """
    pending: list[tuple[KeyPath, Any]] = [((), content)]
    count = 0
    while pending:
        path, node = pending.pop()
        if not isinstance(node, (dict, list, tuple)):
            continue
        where = dotted(path[:3]) or "the whole"
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{source}: {where}: is nested deeper than {MAX_DEPTH} levels; an experiment has five")
        count += len(node)
        if count > MAX_VALUES:
            raise ConfigError(f"{source}: {where}: holds more than {MAX_VALUES:,} values; an experiment has some sixty")
        children = node.items() if isinstance(node, dict) else enumerate(node)
        pending += [((*path, key), child) for key, child in children]


def _repeated_keys(content: Any, path: KeyPath = ()) -> Iterator[Problem]:
    for key in getattr(content, "repeated", ()):
        yield Problem((*path, key), content[key], "is there more than once; keep one")
    children = content.items() if isinstance(content, dict) else ()
    for key, child in children:
        yield from _repeated_keys(child, (*path, key))
