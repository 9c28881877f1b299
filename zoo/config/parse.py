"""Reads experiment files and reports all problems of a file at once."""

from __future__ import annotations

import difflib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zoo.config.architectures import ARCHITECTURES, NETWORK_PACKAGES
from zoo.config.describe import describe_settings
from zoo.config.experiment import Experiment
from zoo.config.network import ExternalSpec, read_original_keys, spec_class
from zoo.config.section import (
    MAX_PROBLEMS,
    UNKNOWN_KEY,
    KeyPath,
    Problem,
    check_extent,
    dotted,
    problems_of,
    raise_problems,
)
from zoo.errors import ConfigError, escape, nearest
from zoo.files import decode_text, open_regular

logger = logging.getLogger("zoo")

#: The type of an optimizer or a schedule -> the settings that belong to the type.
SETTINGS_OF_TYPE = {
    "optimizer.type": ("nesterov", "params"),
    "optimizer.schedule.type": ("params",),
}


def experiments_dir() -> Path:
    """Return the folder of the bundled experiments, in the installed package or the source checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"


def experiment_names() -> list[str]:
    """Return the names of the bundled experiments, sorted."""
    return sorted(file.stem for file in experiments_dir().glob("*.json"))


def find_experiment(name: str | Path) -> Path | None:
    """Return the file of an experiment, given by path or by bundled name; None if there is none.

    A name that ends in ``.json`` is the path of a file if the file exists, otherwise the name of a bundled file.
    """
    path, is_json = Path(name), Path(name).suffix == ".json"
    bundled = experiments_dir() / (path if is_json else f"{name}.json")
    if is_json and (path.exists() or not bundled.is_file()):
        return path
    return bundled if bundled.is_file() else None


def load_experiment(name: str | Path, log_notices: bool = True, known_networks_only: bool = True) -> Experiment:
    """Load the experiment in a JSON file, given by path, or by name if it is bundled.

    Accepts files of the original project. ``log_notices``: log ignored settings and implied defaults.
    ``known_networks_only``: a user's own network is an error. Raises ConfigError with every problem of the file, its
    key and value; for a missing file, with the bundled experiments that have the nearest names.
    """
    path = find_experiment(name) or Path(name)
    try:
        with open_regular(path) as file:
            text = decode_text(file.readall())
        content = json.loads(text, object_pairs_hook=_JsonObject)
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror}); give the path of an experiment file or a name",
            path,
            nearest(path.stem, experiment_names(), f"{experiments_dir()} has all"),
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{escape(path)}:{error.lineno}:{error.colno}: {error.msg} (strict JSON: no comments, no trailing commas)"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8; numbers or nesting beyond Python's limits
        raise ConfigError(f"{escape(path)}: is not a JSON file ({error})") from None
    return _parse(content, escape(path), known_networks_only, log_notices)


def parse_experiment(content: dict[str, Any], source: str) -> Experiment:
    """Return the experiment for parsed JSON ``content``; ``source`` names it in messages.

    Accepts the original project's keys of the ``network`` section, see `zoo.config.network.read_original_keys`, and
    unknown architectures, for custom networks. Raises ConfigError with one line per problem.
    """
    return _parse(content, source, known_networks_only=False)


def _parse(content: Any, source: str, known_networks_only: bool, log_notices: bool = True) -> Experiment:
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: should be a JSON object, not a {type(content).__name__}")
    check_extent(content, source)
    network = content.get("network", {})
    present = {**content, "network": read_original_keys(network)} if isinstance(network, dict) else content
    problems = list(_repeated_keys(content))
    try:
        experiment = Experiment.model_validate(present)
    except ValidationError as error:
        found = list(problems_of(error))
        problems += [*map(_with_nearest, found[:MAX_PROBLEMS]), *found[MAX_PROBLEMS:]]  # only the first are printed
    if known_networks_only:
        problems += _unknown_network(content)
    if problems:
        raise_problems(problems, source)
    if log_notices and network.get("input_3x3") is True and "input_3x3" not in experiment.network.options:
        logger.info("%s: network.input_3x3 = true: is ignored; %s has one stem", source, experiment.network.arch)
    return experiment


@cache
def _places() -> dict[str, dict[str, None]]:
    """Map last keys and aliases to the dotted paths of all sections and settings that have them."""
    places: dict[str, dict[str, None]] = {}
    for section in describe_settings():
        for path in (section.path.partition(" ")[0], *(setting.name for setting in section.settings)):
            places.setdefault(path.rpartition(".")[2], {})[path] = None
        for setting in section.settings:
            for alias in setting.aliases:
                places.setdefault(alias, {})[f"{setting.name} (alias {alias})"] = None
    return places


def settings_named(key: str) -> tuple[str, ...]:
    """Return the dotted names of the settings whose last key, or an alias of it, is ``key``."""
    return tuple(place.partition(" ")[0] for place in _places().get(key, ()) if "." in place)


def replace_settings(content: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values in the settings of an experiment. The keys of ``changes`` are dotted; aliases are accepted.

    Another type of optimizer or schedule resets the settings in `SETTINGS_OF_TYPE`, unless ``changes`` contains them.
    Does not validate values. Raises ConfigError for a key that is not within sections.
    """
    content = deepcopy(content)
    aliases = {
        f"{setting.name.rpartition('.')[0]}.{alias}": setting.name
        for section in describe_settings()
        for setting in section.settings
        for alias in setting.aliases
    }
    # Sections before their settings, and types before the settings that they reset.
    for key in sorted(changes, key=lambda key: (key.count("."), key not in SETTINGS_OF_TYPE)):
        value = changes[key]
        *sections, last = aliases.get(key, key).split(".")
        inner = content
        for section in sections:
            if inner.get(section) is None:
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                raise ConfigError(f"{section} is a setting, not a section", key, "zoo settings lists all settings")
        if inner.get(last) != value:
            for name in SETTINGS_OF_TYPE.get(key, ()):
                inner.pop(name, None)
        inner[last] = value
    return content


def _with_nearest(problem: Problem) -> Problem:
    """Return the problem; for an unknown key with the settings that have the nearest name.

    Settings of the same section come before settings of other sections.
    """
    if problem.message != UNKNOWN_KEY:
        return problem
    section = dotted(problem.path).rpartition(".")[0]
    near = difflib.get_close_matches(str(problem.path[-1]), _places(), cutoff=0.7)
    here = [place for name in near for place in _places()[name] if place.rpartition(".")[0] == section]
    places = here[:1] or [place for name in near[:1] for place in _places()[name]]
    places = [place for place in places if place != dotted(problem.path)]
    hint = f"the nearest is {' or '.join(places)}" if places else "zoo settings lists all"
    return replace(problem, message=f"{UNKNOWN_KEY}; {hint}")


class _JsonObject(dict[str, Any]):
    """A JSON object that remembers its repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def _unknown_network(content: dict[str, Any]) -> Iterator[Problem]:
    network = content.get("network")
    arch = network.get("arch") if isinstance(network, dict) else None
    if not isinstance(arch, str) or arch in ARCHITECTURES or spec_class(arch) is ExternalSpec:
        return
    if ":" in arch:
        names = " and ".join(f'"{package}:NAME"' for package in NETWORK_PACKAGES)
        yield Problem(("network", "arch"), arch, f"networks of other packages are named {names}")
        return
    hint = nearest(arch, ARCHITECTURES, "zoo list shows all")
    yield Problem(("network", "arch"), arch, f"there is no such network; {hint}")


def _repeated_keys(content: Any, path: KeyPath = ()) -> Iterator[Problem]:
    for key in getattr(content, "repeated", ()):
        yield Problem((*path, key), content[key], "is repeated; keep one of them")
    children = content.items() if isinstance(content, dict) else ()
    for key, child in children:
        yield from _repeated_keys(child, (*path, key))
