"""``zoo show``: print the facts of a network, an experiment, a checkpoint or a weights file, or compare two files."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.cli.list_networks import describe, sizes_of
from zoo.cli.options import Command, argument
from zoo.errors import EXIT_VERIFICATION_FAILED, ConfigError, escape, shorten_repr

if TYPE_CHECKING:
    from zoo.weights import StoredWeights

WIDTH = 110
INDENT = 26
MAX_COMPARED = 20  # print at most so many differing tensors


@dataclass(frozen=True, kw_only=True)
class Show(Command):
    """Print the facts of a network or weights file, or the settings of an experiment."""

    example = "zoo show resnet50"
    name: str = argument("NAME")
    """Architecture, published network, PACKAGE:NAME of another package, bundled experiment (with .json if a network
    has the same name), experiment file, checkpoint, weights file, or hf-hub:OWNER/NAME."""
    other: str | None = argument("OTHER", default=None)
    """Second checkpoint or weights file: print the names of the tensors that differ."""
    json: bool = False
    """Print JSON; the settings of an experiment are always JSON."""

    def run(self) -> int:
        from zoo.config.network import ExternalSpec
        from zoo.config.published import published
        from zoo.registry.open import find_network

        if self.other is not None:
            return _compare(self.name, self.other)
        opened = find_network(self.name)
        if opened.experiment is not None and opened.is_experiment and self.name not in published():
            print(json.dumps(opened.experiment.model_dump(mode="json"), indent=2))
            return 0
        if opened.weights is not None:
            facts = _facts_of_file(opened.weights)
        elif isinstance(opened.spec, ExternalSpec):
            facts = _facts_of_external(self.name)
        else:
            facts = _facts_of_network(self.name)
        print(json.dumps(facts, indent=2)) if self.json else _print(facts)
        return 0


def _compare(*names: str) -> int:
    """Print the names of the tensors that differ between two files, and return 3 if there are any."""
    from zoo.engine._digest import differences, digest, state_tensors
    from zoo.registry.open import find_network

    found = []
    for name in names:
        stored = find_network(name).weights
        if stored is None:
            raise ConfigError("this is not a weights file", name, "give two checkpoints or weights files")
        has_state = "state_dict" in stored.content
        found.append(state_tensors(stored.content if has_state else {"state_dict": stored.state_dict}))
    differing = list(differences(*found))
    for name, tensors in zip(names, found, strict=True):
        print(f"{digest(tensors)}  {escape(name)}")
    for name, what in differing[:MAX_COMPARED]:
        print(f"{escape(name)}: {what}")
    more = f" (the first {MAX_COMPARED} above)" if len(differing) > MAX_COMPARED else ""
    print(f"{len(differing):,} of {len({*found[0], *found[1]}):,} tensors differ{more}" if differing else "equal")
    return EXIT_VERIFICATION_FAILED if differing else 0


def _facts_of_network(name: str) -> dict[str, Any]:
    """Return the structure of a network, its training settings and scores, and the source of its weights."""
    from zoo.config.architectures import ARCHITECTURES
    from zoo.config.describe import describe_options
    from zoo.config.published import published

    entry, about = describe(name), published().get(name)
    arch = ARCHITECTURES[entry["arch"]]
    stages = [dict(zip(("num_chs", "reduction", "module"), stage, strict=True)) for stage in sizes_of(name)["stages"]]
    facts = {**entry, "options": describe_options(arch), "stages": stages}
    if about is None:
        return facts
    return {
        **facts,
        "published": {
            "name": about.name,
            "network": about.experiment.network.model_dump(mode="json"),
            "batch": about.experiment.optimizer.batch_size if about.experiment.has_recipe else None,
            about.digest.kind: about.digest.digits,
            **about.weights.model_dump(exclude_none=True),
            "page": about.page,
            "source": about.expected.source,
        },
    }


def _facts_of_external(name: str) -> dict[str, Any]:
    """Build a network of another package on the meta device; return its size."""
    from zoo.config.architectures import EXTERNAL_MEMORY
    from zoo.config.network import ExternalSpec
    from zoo.models.build import build_on_meta

    model = build_on_meta(ExternalSpec(arch=name))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"arch": name, "parameters": num_parameters, "memory": ", ".join(EXTERNAL_MEMORY)}


def _facts_of_file(stored: StoredWeights) -> dict[str, Any]:
    """Return the content and metadata of a checkpoint, a weights file or a repository, without building a network."""
    from zoo.engine._checkpoint import parse_progress
    from zoo.weights import digests_of

    experiment = stored.experiment
    return {
        "file": stored.source,
        "bytes": stored.path.stat().st_size,
        **digests_of(stored.path),
        "network": None if stored.record is None else stored.record.content(),
        "parameters": stored.num_parameters,
        **parse_progress(stored.content),
        "settings": None if experiment is None else experiment.model_dump(mode="json"),
    }


def _print(facts: Mapping[str, Any], indent: str = "") -> None:
    """Print facts line by line, omitting unknown facts. Facts of an inner dict are indented."""
    for name, fact in facts.items():
        if isinstance(fact, dict) and fact:
            print(f"{indent}{name}:")
            _print(fact, indent + "  ")
        elif fact not in (None, {}, []):
            text = f"{fact:,}" if type(fact) is int else fact if isinstance(fact, str) else shorten_repr(fact)
            head = f"{indent + name:<{INDENT - 1}} "
            print(textwrap.fill(escape(text), WIDTH, initial_indent=head, subsequent_indent=" " * INDENT))
