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

    example = "zoo settings schedule"
    pattern: str = argument("PATTERN", default="*")
    """Only settings whose name contains this text or matches this shell-style pattern, such as 'schedule' or
    'input.*_val' (default: all)."""

    json: bool = False
    """Print a JSON schema of experiment files, for editors."""

    def run(self) -> int:
        from zoo.config.describe import describe_settings
        from zoo.config.experiment import Experiment

        if self.json:
            print(json.dumps(Experiment.model_json_schema(), indent=2))
            return 0
        sections = describe_settings(self.pattern)
        if not sections:
            settings = [setting for section in describe_settings() for setting in section.settings]
            names = {name for each in settings for name in (each.name, each.key, *each.aliases)}
            what = f"no setting is called {escape(self.pattern)!r}"
            raise ConfigError(what, "PATTERN", nearest(self.pattern, names, "zoo settings lists all"))
        for section in sections:
            print(f"{section.path}: {section.meaning}")
            for setting in section.settings:
                print(f"  {setting.key:<24}  {'; '.join(setting.facts())}")
                print(textwrap.fill(setting.meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
            print()
        return 0
