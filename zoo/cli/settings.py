"""``zoo settings``: the settings of experiment files: type, default, bounds and meaning."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass

from zoo.cli.options import Command, argument
from zoo.errors import ConfigError, escape, nearest

WIDTH = 110
INDENT = " " * 6


@dataclass(frozen=True, kw_only=True)
class Settings(Command):
    """Print the settings of experiment files: type, default, bounds and meaning."""

    pattern: str = argument("PATTERN", default="*")
    """Only settings whose name contains this text or matches this shell-style pattern, such as 'schedule' or
    'input.*_val' (default: all)."""

    def run(self) -> int:
        """Print the settings that match; ConfigError if there are none."""
        print_settings(self.pattern)
        return 0


def print_settings(pattern: str = "*") -> None:
    """Print the settings whose dotted name contains or matches ``pattern``, grouped by section."""
    from zoo.config import describe_settings

    sections = describe_settings(pattern)
    if not sections:
        settings = [setting for section in describe_settings() for setting in section.settings]
        near = ", ".join(nearest(pattern, {name for setting in settings for name in (setting.name, setting.key)}))
        raise ConfigError(f"no setting is called {escape(pattern)!r}", "PATTERN", f"the nearest names are {near}")
    for section in sections:
        print(f"{section.path}: {section.meaning}")
        for setting in section.settings:
            print(f"  {setting.key:<24}  {'; '.join(setting.facts())}")
            print(textwrap.fill(setting.meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        print()


def print_schema() -> None:
    """Print the JSON schema of experiment files, for editors."""
    from zoo.config import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))
