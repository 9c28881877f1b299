"""The command line: ``zoo`` and ``python -m zoo``, one file per command.

Nothing here imports torch before a command runs, so that ``--help`` and usage errors are printed immediately.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo.cli.benchmark import BENCHMARK
from zoo.cli.convert import Convert
from zoo.cli.data import DATA
from zoo.cli.doctor import Doctor
from zoo.cli.fetch import Fetch
from zoo.cli.lean import Lean, split_arguments
from zoo.cli.list_networks import List
from zoo.cli.options import Command, Group, add_options, parse_all, parsed, whole_number
from zoo.cli.plot import Plot
from zoo.cli.predict import Predict
from zoo.cli.push import Push
from zoo.cli.quickstart import Quickstart
from zoo.cli.reproduce import REPRODUCE
from zoo.cli.segment import Segment
from zoo.cli.settings import Settings
from zoo.cli.show import Show
from zoo.cli.train import Train
from zoo.cli.validate import Validate
from zoo.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_KEYBOARD_INTERRUPT,
    EXIT_USER_ERROR,
    ConfigError,
    ZooError,
    escape,
    hide_secrets,
)
from zoo.files import version
from zoo.run.console import environment_rank, set_up_console

COMMANDS: Mapping[str, type[Command] | Group] = {
    "quickstart": Quickstart,
    "doctor": Doctor,
    "list": List,
    "show": Show,
    "settings": Settings,
    "fetch": Fetch,
    "data": DATA,
    "train": Train,
    "validate": Validate,
    "plot": Plot,
    "lean": Lean,
    "convert": Convert,
    "push": Push,
    "predict": Predict,
    "segment": Segment,
    "reproduce": REPRODUCE,
    "benchmark": BENCHMARK,
}


class HelpFormatter(argparse.HelpFormatter):
    """Prints the help of a subcommand on the line of its name.

    Before Python 3.13, argparse computes the width of the first column without the indentation of subcommands. The help
    of the longest names then starts on a new line.
    """

    def add_argument(self, action: argparse.Action) -> None:
        """Add the help of an argument."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            width = self._current_indent + self._indent_increment + max(map(len, action.choices))
            self._action_max_length = max(self._action_max_length, width)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or the ``exit_code`` of the ZooError that it raised.

    ``argv`` defaults to the arguments of the process. Usage errors exit with code 2, as argparse does.
    """
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    others: tuple[str, ...] = ()
    if next((word for word in words if not word.startswith("-")), None) == "lean":
        words, others = split_arguments(words)
    words = _arguments(parser, words)
    args = parse_all(parser, words)
    if "command" not in args:
        parser.print_help(sys.stderr)
        parser.exit(EXIT_USER_ERROR)
    return _run(args, shlex.join(["zoo", *words, *others]), others)


def run_script(command: type[Command], argv: Sequence[str] | None = None) -> int:
    """Run ``command`` as a standalone script with its own arguments; return its exit code."""
    parser = argparse.ArgumentParser(description=_descriptions(command)[1])
    add_options(parser, command)
    words = _arguments(parser, argv)
    return _run(parse_all(parser, words), shlex.join([sys.argv[0], *words]))


def _arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> list[str]:
    """Remove --local-rank, which torch.distributed.launch puts before all other arguments.

    Sets LOCAL_RANK to its value; launchers that set both set the same number.
    """
    launcher = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    launcher.add_argument("--local-rank", "--local_rank", type=whole_number, metavar="N")
    args, words = launcher.parse_known_args(argv)
    if args.local_rank is not None:
        number = os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
        if number != str(args.local_rank):
            launcher.error(f"--local-rank {args.local_rank}, but the environment has LOCAL_RANK={escape(number)}")
    return words


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="zoo",
        description="Train, score and convert networks that classify or segment images.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zoo {version()}", help="Print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        if isinstance(command, Group):
            group = commands.add_parser(
                name, help=command.summary, description=f"{command.summary}.", formatter_class=HelpFormatter
            )
            kinds = group.add_subparsers(metavar="KIND", required=True, help="See KIND --help")
            for kind, command_of_kind in command.kinds.items():
                _add_command(kinds, kind, command_of_kind)
        else:
            _add_command(commands, name, command)
    return parser


def _add_command(commands: argparse._SubParsersAction[Any], name: str, command: type[Command]) -> None:
    summary, description = _descriptions(command)
    epilog = f"example: {command.example}".replace("%", "%%")
    add_options(commands.add_parser(name, help=summary, description=description, epilog=epilog), command)


def _descriptions(command: type[Command]) -> tuple[str, str]:
    """Return the summary (without period) and the description of a command for argparse, from its docstring."""
    paragraphs = [" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n")]
    return paragraphs[0].removesuffix(".").replace("%", "%%"), " ".join(paragraphs)


def _run(args: argparse.Namespace, command_line: str, others: tuple[str, ...] = ()) -> int:
    """Run a parsed command and return its exit code.

    Prints a ZooError to stderr, with a traceback if ``--debug`` is given. Ctrl-C prints one line and exits with code
    130. If the reader of the output stops reading (``zoo list | head -1``), exits with code 141 and prints nothing,
    like other programs.

    Args:
    - `others`: arguments of the script that the command runs.
    """
    command = parsed(args.command, args, hide_secrets(command_line))
    if not command.owns_console:
        return _run_transparently(args, replace(command, arguments=others))
    set_up_console(rank=environment_rank())
    # Spinning threads slow a step down many times as soon as another program needs a core. torch is not imported
    # yet; it reads the variable when it is.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = command.run()
        sys.stdout.flush()  # a BrokenPipeError is handled below
    except ZooError as error:
        _print_error(args, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error(args, "interrupted")
        return EXIT_KEYBOARD_INTERRUPT
    except BrokenPipeError:
        # Python flushes stdout again at exit, and would report a failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def _run_transparently(args: argparse.Namespace, command: Any) -> int:
    """Run a command that runs a script. Console, errors and interrupts belong to the script."""
    try:
        code: int = command.run()
    except ConfigError as error:
        _print_error(args, str(error))
        return error.exit_code
    return code


def _print_error(args: argparse.Namespace, message: str) -> None:
    if args.debug:
        traceback.print_exc()
    # A message may have several lines. Other control characters are escaped.
    print(f"{args.parser.prog}:", "\n".join(map(escape, message.split("\n"))), file=sys.stderr)
