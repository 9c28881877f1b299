"""``zoo list``: a table of the networks, their sizes and their published scores."""

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


@dataclass(frozen=True, kw_only=True)
class List(Command):
    """Print a table of the networks and their published scores."""

    patterns: tuple[str, ...] = argument("PATTERN", default=("*",))
    """Only networks whose name matches this shell-style pattern ('resnext*') or contains this text (default: all)."""
    pretrained: bool = False
    """Only networks with published weights."""
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
        headers = ["name", "parameters, M", "norms", "channels of the stages", *PROTOCOL_TITLES.values()]
        rows = [
            [
                entry["name"],
                entry["parameters"] / 1e6,
                entry["norms"],
                " ".join(map(str, entry["channels"])),
                *(_score_cell(entry["scores"].get(protocol)) for protocol in PROTOCOL_TITLES),
            ]
            for entry in entries
        ]
        print(markdown_table(headers, rows))
        print(
            "Scores: top-1 / top-5 in percent on ImageNet, or mIoU on whole images and their mirror images, as "
            "published with the weights; zoo show NAME prints more.\n"
            "torchvision:NAME and timm:NAME are networks of these packages, as in zoo train torchvision:resnet18 DATA."
        )
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


def _score_cell(score: dict[str, float] | None) -> str:
    return " / ".join(f"{value:.2f}" for value in score.values()) if score else ""
