"""``zoo list`` and ``zoo show``: the networks, counted on the meta device, and their published weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import ConfigError, nearest

if TYPE_CHECKING:
    from zoo.models import Network

PROTOCOL_TITLES = {"center224": "224", "tencrop224": "224, ten crops", "center320": "320"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``list`` and ``show``."""
    parser = commands.add_parser("list", help="print a table of the networks and their published scores")
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", default="*", help="shell-style, for instance 'resnext*'"
    )
    parser.add_argument("--pretrained", action="store_true", help="only networks with published weights")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.set_defaults(run=run_list)
    parser = commands.add_parser("show", help="print everything known about one network or weights file")
    parser.add_argument(
        "name", metavar="NAME", help="an architecture, a published network, or a checkpoint or weights file"
    )
    parser.set_defaults(run=run_show)


def run_list(args: argparse.Namespace) -> int:
    """Print one line per network whose name matches; returns 0."""
    from zoo.registry import list_models
    from zoo.report.tables import markdown_table

    names = list_models(args.pattern, args.pretrained)
    if not names:
        near = ", ".join(nearest(args.pattern, list_models(pretrained=args.pretrained)))
        raise ConfigError(f"no network is called {args.pattern!r}; PATTERN: the nearest names are {near}")
    entries = [_entry(name) for name in names]
    if args.json:
        print(json.dumps(entries, indent=2))
        return 0
    headers = ["name", "parameters, M", "norms", "channels of the stages", *PROTOCOL_TITLES.values()]
    rows = [
        [
            entry["name"],
            entry["parameters"] / 1e6,
            entry["norms"],
            " ".join(map(str, entry["channels"])),
            *(_score(entry["scores"].get(protocol)) for protocol in PROTOCOL_TITLES),
        ]
        for entry in entries
    ]
    print(markdown_table(headers, rows))
    print("Scores: top-1 / top-5 in percent on ImageNet, as published with weights; zoo show NAME tells more.")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print what a network is made of, how it was trained and scored, and where its weights are; returns 0."""
    if Path(args.name).is_file() and not args.name.endswith(".json"):
        from zoo.cli.show_file import show_file

        return show_file(Path(args.name))
    from zoo.registry import options_of, published
    from zoo.report.tables import markdown_table

    model, entry = _build(args.name), _entry(args.name)
    facts = {
        "architecture": entry["arch"],
        "parameters": f"{entry['parameters']:,}",
        "without classifier": f"{entry['parameters_headless']:,}",
        "norm layers": entry["norms"],
        "state dict": f"{len(model.state_dict())} entries",
        "options": ", ".join(options_of(entry["arch"])) or "none",
        **_publication(published().get(args.name)),
    }
    for name, fact in facts.items():
        print(f"{name:<20}{fact}")
    stages = [[stage["module"], stage["num_chs"], stage["reduction"]] for stage in model.feature_info.get_dicts()]
    print(f"\n{markdown_table(['stage', 'channels', 'reduction'], stages)}")
    if entry["scores"]:
        scores = [[name, score["top1"], score["top5"]] for name, score in entry["scores"].items()]
        print(f"\n{markdown_table(['protocol', 'top-1 %', 'top-5 %'], scores)}")
    return 0


def _build(name: str) -> Network:
    """Return the network on the meta device: sizes and names, but neither memory nor values."""
    import torch

    from zoo.registry import get

    with torch.device("meta"):
        return get(name)


def _entry(name: str) -> dict[str, Any]:
    from zoo.registry import published

    model = _build(name)
    about = published().get(name, {"arch": name, "scores": {}})
    in_classifier = sum(parameter.numel() for parameter in model.classifier.parameters())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "name": name,
        "arch": about["arch"],
        "parameters": parameters,
        "parameters_headless": parameters - in_classifier,
        "norms": sum(key.endswith("running_mean") for key in model.state_dict()),
        "channels": model.feature_info.channels(),
        "scores": about["scores"],
    }


def _score(score: dict[str, float] | None) -> str:
    return f"{score['top1']:.2f} / {score['top5']:.2f}" if score else ""


def _publication(entry: dict[str, Any] | None) -> dict[str, Any]:
    """Return the settings and the origin of published weights."""
    if entry is None:
        return {}
    return {
        "norm": entry["norm"],
        "activation": f"{entry['activation']} ({entry['activation_param']})",
        "stem": "three 3x3" if entry["input_3x3"] else "as the architecture's",
        "trained with": f"batches of {entry['batch']}",
        "weights md5": entry["md5"],
        "weights at": f"https://drive.google.com/file/d/{entry['drive_id']}/view",
        "licence of weights": entry["licence"],
        "source": entry["source"],
    }
