"""The options of the command line equal cli_options.json, so that they change only on purpose.

After a wanted change: python -m tests.golden
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.conftest import Cli
from zoo.cli import COMMANDS, build_parser
from zoo.cli.lean import split_arguments
from zoo.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "cli_options.json"


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands and subcommands of a parser by name, such as "benchmark layer"."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found |= {name: command} | {f"{name} {inner}": sub for inner, sub in _commands_of(command).items()}
    return found


def _options() -> dict[str, dict[str, object]]:
    """Return, for each command, its options with their defaults, and its positional arguments."""
    return {
        name: {
            "/".join(action.option_strings) or str(action.metavar): _text(action)
            for action in parser._actions
            if action.dest != "help"
        }
        for name, parser in _commands_of(build_parser()).items()
    }


def generated() -> dict[Path, str]:
    return {GOLDEN: json.dumps(_options(), indent=2) + "\n"}


def _text(action: argparse.Action) -> str:
    if action.dest == "workers":
        return "number of cores"
    return str(list(action.default) if isinstance(action.default, tuple) else action.default)


def test_commands_and_options_match_golden_file() -> None:
    assert _options() == json.loads(GOLDEN.read_text()), "if the change is wanted: python -m tests.golden"


def test_help_begins_with_commands_for_newcomers_and_keeps_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert list(COMMANDS)[:2] == ["quickstart", "doctor"]
    parsers = {
        "": build_parser(),
        **{name: _commands_of(build_parser())[name] for name in ("data", "reproduce", "benchmark")},
    }
    for name, parser in parsers.items():
        assert parser.description, name
        lines = parser.format_help().splitlines()
        for command in _commands_of(parser):
            assert [line for line in lines if line.startswith(f"    {command} ")] or " " in command, command


def test_example_of_each_command_is_accepted_by_it() -> None:
    of_all = build_parser()
    for name, parser in _commands_of(of_all).items():
        if parser.get_default("command") is None:
            continue  # a group of commands
        example = parser.get_default("command").example
        assert example in " ".join(parser.format_help().split())
        words, _ = split_arguments(shlex.split(example)[1:]) if name == "lean" else (shlex.split(example)[1:], ())
        assert of_all.parse_args(words).parser.prog == f"zoo {name}"


def test_help_usage_errors_and_descriptions_of_networks_need_no_torch() -> None:
    code = "import sys, zoo.cli, zoo.config.published; zoo.cli.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_waiting_threads_sleep_unless_user_decides(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in (("", "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", before)
        if not before:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        cli("settings", "seed")
        assert os.environ["OMP_WAIT_POLICY"] == after


def test_debug_prints_traceback_of_user_error(cli: Cli) -> None:
    assert "Traceback" in cli("train", "no-such-file.json", "data", "--debug", code=2).err


class NoSpace(DataError):
    exit_code = 75


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (NoSpace("broken\x1b"), 75, "zoo list: broken\\x1b\n"),
        (KeyboardInterrupt(), 130, "zoo list: interrupted\n"),
        (KeyError("broken"), None, ""),
    ],
)
def test_error_determines_exit_code(
    error: BaseException, code: int | None, printed: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.registry.names.list_models", mock.Mock(side_effect=error))
    if code is None:
        with pytest.raises(KeyError, match="broken"):
            cli("list")
    else:
        assert cli("list", code=code) == ("", printed)
