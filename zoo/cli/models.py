"""``zoo list`` and ``zoo show``: networks, counted without their weights, their published weights, and experiments."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import ConfigError, nearest, printable

if TYPE_CHECKING:
    from zoo.models import Network
    from zoo.weights.published import Published

WIDTH = 110
PROTOCOL_TITLES = {"center224": "224", "tencrop224": "224, ten crops", "center320": "320"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``list`` and ``show``."""
    parser = commands.add_parser("list", help="print a table of the networks and their published scores")
    parser.add_argument(
        "patterns", metavar="PATTERN", nargs="*", default=["*"], help="shell-style, for instance 'resnext*'"
    )
    parser.add_argument("--pretrained", action="store_true", help="only networks with published weights")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.set_defaults(run=run_list)
    parser = commands.add_parser(
        "show", help="print everything known about one network or weights file, or the settings of an experiment"
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?",
        help="an architecture, a published network, a bundled experiment (with .json where a network has its name too) "
        "or an experiment file, a checkpoint or weights file",
    )  # fmt: skip
    parser.add_argument(
        "--schema", action="store_true", help="print all keys of experiment files: type, default, bounds and meaning"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --schema a JSON schema")
    parser.set_defaults(run=run_show)


def run_list(args: argparse.Namespace) -> int:
    """Print one line per network whose name matches; returns 0."""
    from zoo.registry import list_models
    from zoo.report.tables import markdown_table

    for pattern in args.patterns:
        if not list_models(pattern, args.pretrained):
            near = ", ".join(nearest(pattern, list_models(pretrained=args.pretrained)))
            raise ConfigError(f"no network is called {printable(pattern)!r}; PATTERN: the nearest names are {near}")
    entries = [_entry(name, model) for name, model in _build_all(list_models(args.patterns, args.pretrained))]
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
    """Print what a network is made of, an experiment's settings, its possible keys, or what a file says; returns 0."""
    if args.schema:
        return _show_schema(args)
    if args.name is None:
        raise ConfigError("nothing to show; command line: give the name of a network or an experiment, or --schema")
    if args.name.endswith(".json") or _is_bundled_only(args.name):
        return _show_experiment(args)
    if os.path.isfile(args.name) or _is_path_only(args.name):
        from zoo.cli.show_file import show_file

        return show_file(Path(args.name), args.json)
    return _show_network(args)


def _is_bundled_only(name: str) -> bool:
    """Return whether a bundled experiment has this name, and no network or file."""
    from zoo.config import experiment_names
    from zoo.registry import list_models

    return name in experiment_names() and name not in list_models() and not os.path.exists(name)


def _is_path_only(name: str) -> bool:
    """Return whether something that is no plain file has this name (a folder, a pipe), and no network."""
    from zoo.registry import list_models

    return os.path.lexists(name) and name not in list_models()


def _show_schema(args: argparse.Namespace) -> int:
    from zoo.cli.settings import print_schema, print_settings

    if args.name is not None:
        raise ConfigError(f"--schema is about all experiment files; command line: leave {printable(args.name)!r} out")
    if args.json:
        print_schema()
    else:
        print_settings()
    return 0


def _show_experiment(args: argparse.Namespace) -> int:
    """Print all settings as an experiment file, and which of them are not the defaults."""
    from zoo.config import differences, load_experiment

    experiment = load_experiment(args.name)
    print(json.dumps(experiment.model_dump(mode="json"), indent=2))
    if not args.json:
        print("\nnot the defaults:")
        for path, value in differences(experiment).items():
            print(f"  {path:<34}{json.dumps(value)}")
        for doubt in experiment.doubts():
            print(f"\nwarning: {doubt}")
    return 0


def _show_network(args: argparse.Namespace) -> int:
    """Print what a network is made of, how it was trained and scored, and where its weights are."""
    from zoo.architectures import ARCHITECTURES, OPTIONS
    from zoo.registry import published
    from zoo.report.tables import markdown_table

    ((_, model),) = _build_all([args.name])
    entry = _entry(args.name, model)
    record = ARCHITECTURES[entry["arch"]]
    options = {option: OPTIONS[option].meaning for option in record.options}
    options["memory"] += f": {', '.join(record.memory)}"
    stages = model.feature_info.get_dicts()
    if args.json:
        about = published()[args.name].to_json() if args.name in published() else None
        print(json.dumps({**entry, "options": options, "stages": stages, "published": about}, indent=2))
        return 0
    facts = {
        "architecture": entry["arch"],
        "parameters": f"{entry['parameters']:,}",
        "without classifier": f"{entry['parameters_headless']:,}",
        "norm layers": entry["norms"],
        "state dict": f"{len(model.state_dict())} entries",
        **(_publication(published()[args.name]) if args.name in published() else {}),
    }
    for name, fact in facts.items():
        print(f"{name:<20}{fact}")
    print("\noptions of zoo.get:")
    for option, meaning in options.items():
        print(textwrap.fill(meaning, WIDTH, initial_indent=f"  {option:<18}", subsequent_indent=" " * 20))
    rows = [[stage["module"], stage["num_chs"], stage["reduction"]] for stage in stages]
    print(f"\n{markdown_table(['stage', 'channels', 'reduction'], rows)}")
    if entry["scores"]:
        scores = [[name, score["top1"], score["top5"]] for name, score in entry["scores"].items()]
        print(f"\n{markdown_table(['protocol', 'top-1 %', 'top-5 %'], scores)}")
    return 0


def _build_all(names: Sequence[str]) -> Iterator[tuple[str, Network]]:
    """Yield each name with its network, which has sizes and names, but no weights.

    Published networks that differ in their norms alone have the same sizes: each of these is built once.
    """
    from zoo.layers.conv import counting
    from zoo.registry import get, published

    built: dict[tuple[str, bool], Network] = {}
    for name in names:
        about = published()[name].to_json() if name in published() else {}
        shape = about.get("arch", name), about.get("input_3x3", False)
        if shape not in built:
            with counting():
                built[shape] = get(name)
        yield name, built[shape]


def _entry(name: str, model: Network) -> dict[str, Any]:
    from zoo.registry import published

    about = published()[name].to_json() if name in published() else {"arch": name, "scores": {}}
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


def _publication(published: Published) -> dict[str, Any]:
    """Return the settings and the origin of published weights."""
    entry = published.to_json()
    return {
        "norm": entry["norm"],
        "activation": f"{entry['activation']} ({entry['activation_param']})",
        "stem": "three 3x3" if entry["input_3x3"] else "as the architecture's",
        "trained with": f"batches of {entry['batch']}",
        "weights md5": entry["md5"],
        "weights at": published.page,
        "licence of weights": entry["licence"],
        "source": entry["source"],
    }
