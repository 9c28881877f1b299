"""``zoo list``: a table of the networks and their sizes, or of the published weights and their scores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from zoo.cli.options import Command, argument
from zoo.errors import ConfigError, escape, nearest

PROTOCOL_TITLES = {
    **{"center224": "224", "tencrop224": "224, ten crops"},
    **{f"center{side}": str(side) for side in (256, 288, 320, 352)},
    "whole-flip": "mIoU",
}
SIZES_NOTE = (
    "zoo list --pretrained prints the published weights and their scores, and zoo show NAME all facts of a network.\n"
    "torchvision:NAME and timm:NAME are networks of these packages, as in zoo train torchvision:resnet18 DATA."
)
SCORES_NOTE = (
    "Published scores in percent: top-1 on ImageNet by size of the images, or mIoU on whole images and their mirror\n"
    "images. zoo show NAME prints all scores."
)


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """Print a table of the networks, or of the published weights and their scores."""

    example = "zoo list 'resnext*'"
    patterns: tuple[str, ...] = argument("PATTERN", default=("*",))
    """Only networks whose name matches this shell-style pattern ('resnext*') or contains this text (default: all)."""
    pretrained: bool = False
    """Only published weights, with their scores."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        from zoo.registry.names import list_models
        from zoo.tables import markdown_table

        patterns = []
        for word in self.patterns:
            pattern = next((each for each in (word, f"*{word}*") if list_models(each, self.pretrained)), None)
            if pattern is None:
                hint = nearest(word, list_models(pretrained=self.pretrained), "zoo list shows all")
                hint += "; networks of torchvision and timm are called torchvision:NAME and timm:NAME"
                raise ConfigError(f"no network is called {escape(word)!r}", "PATTERN", hint)
            patterns.append(pattern)
        entries = [describe(name) for name in list_models(patterns, self.pretrained)]
        if self.json:
            print(json.dumps(entries, indent=2))
            return 0
        rows = [(_scores if self.pretrained else _sizes)(entry) for entry in entries]
        headers = [title for title in rows[0] if any(row[title] not in (None, "") for row in rows)]
        print(markdown_table(headers, [[row[title] for title in headers] for row in rows]))
        print(SCORES_NOTE if self.pretrained else SIZES_NOTE)
        return 0


def describe(name: str) -> dict[str, Any]:
    """Return the facts of a network that ``zoo list`` and ``zoo show`` print: name, sizes and published scores."""
    from zoo.config.architectures import ARCHITECTURES
    from zoo.config.published import published

    about = published().get(name)
    arch, sizes = name, sizes_of(name)
    parameters, headless = sizes["parameters"], sizes["headless"]
    if about is not None:
        arch, num_classes = about.arch, about.experiment.network.num_classes
        parameters = headless + (parameters - headless) // ARCHITECTURES[arch].num_classes * num_classes
    return {
        "name": name,
        "arch": arch,
        "parameters": parameters,
        "parameters_headless": headless,
        "norms": sizes["norms"],
        "channels": [channels for channels, _, _ in sizes["stages"]],
        "scores": {} if about is None else about.scores,
    }


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes of an architecture or a published network. Raises ConfigError for other names.

    Sizes come from the index. A network of a user's family is measured.
    """
    from zoo.config.architectures import architecture, network_sizes
    from zoo.config.published import published

    about = published().get(name)
    if about is not None:
        settings = about.experiment.network
        return network_sizes()[settings.arch + "+input_3x3" * ("input_3x3" in settings.options)]
    architecture(name)
    if name in network_sizes():
        return network_sizes()[name]
    from zoo.models.sizes import measure_sizes

    return measure_sizes(name)


def _sizes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a network by column title."""
    channels = " ".join(map(str, entry["channels"]))
    return {**_name_and_parameters(entry), "norms": entry["norms"], "channels of the stages": channels}


def _scores(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of published weights by column title: the first score of each protocol."""
    scores = entry["scores"]
    of_protocols = {title: next(iter(scores.get(key, {}).values()), None) for key, title in PROTOCOL_TITLES.items()}
    return {**_name_and_parameters(entry), **of_protocols}


def _name_and_parameters(entry: dict[str, Any]) -> dict[str, Any]:
    return {"name": entry["name"], "parameters, M": entry["parameters"] / 1e6}
