"""``zoo settings``: the settings that an experiment file can have, each with its type, default, bounds and meaning."""

from __future__ import annotations

import argparse
import json
import textwrap

from zoo.errors import ConfigError, nearest, printable

WIDTH = 110
INDENT = " " * 6


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``settings``."""
    parser = commands.add_parser("settings", help="print the settings of experiment files, their defaults and meanings")
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", default="*",
        help="only settings whose name contains this text or matches this shell-style pattern, for instance "
        "'schedule' or 'input.*_val' (default: all)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings that match the pattern; returns 0. Raises ConfigError if there are none."""
    print_settings(args.pattern)
    return 0


def print_settings(pattern: str = "*") -> None:
    """Print the settings whose dotted name contains or matches ``pattern``, by the section of the file they are in."""
    from zoo.config import describe_settings

    sections = describe_settings(pattern)
    if not sections:
        settings = [setting for section in describe_settings() for setting in section.settings]
        near = ", ".join(nearest(pattern, {name for setting in settings for name in (setting.name, setting.key)}))
        raise ConfigError(f"no setting is called {printable(pattern)!r}; PATTERN: the nearest names are {near}")
    for section in sections:
        print(f"{section.path}: {section.meaning}")
        for setting in section.settings:
            print(f"  {setting.key:<24}  {'; '.join(setting.facts())}")
            print(textwrap.fill(setting.meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        print()


def print_schema() -> None:
    """Print all settings as a JSON schema, which editors check files against."""
    from zoo.config import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))
