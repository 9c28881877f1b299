"""The command line: ``zoo`` and ``python -m zoo``, one file per command.

Nothing here imports torch before a command runs, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from itertools import takewhile
from typing import Any, NoReturn

from zoo.cli import (
    benchmark,
    compare,
    convert,
    data,
    doctor,
    fetch,
    list_networks,
    predict,
    quickstart,
    reproduce,
    segment,
    settings,
    show,
    train,
    validate,
)
from zoo.engine.interrupts import RememberedInterrupt
from zoo.errors import EXIT_BROKEN_PIPE, EXIT_KEYBOARD_INTERRUPT, EXIT_USER_ERROR, ZooError, nearest, printable
from zoo.run.console import set_up_console

COMMANDS = (
    list_networks, show, settings, fetch, data, train, validate, compare, convert, predict, segment, reproduce,
    benchmark, quickstart, doctor,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or the ``exit_code`` of the ZooError that it raised.

    ``argv`` defaults to the arguments of the process. A ZooError is printed on stderr, without a traceback
    unless ``--debug`` is given; Ctrl-C ends with code 130 and one line. A reader of the output that stops reading
    (``zoo list | head -1``) ends the command without a message and with code 141, as it ends other programs. Wrong
    arguments end the process with code 2, as argparse does.
    """
    set_up_console(rank=_rank())
    parser = build_parser()
    words = _known_command(parser, sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    args.command_line = shlex.join(["zoo", *words])  # recorded in result files
    if args.command is None:
        parser.print_help(sys.stderr)
        parser.exit(EXIT_USER_ERROR)
    # Threads that spin while they wait make a step many times slower as soon as anything else wants a core. torch
    # reads the variable when it is imported, which has not happened yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with RememberedInterrupt():
            code: int = args.run(args)
        sys.stdout.flush()  # here, where a BrokenPipeError is handled
    except ZooError as error:
        _print_error(args, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_error(args, "interrupted")
        return EXIT_KEYBOARD_INTERRUPT
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # Python flushes once more when it ends, and would complain that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="zoo",
        description="Networks that classify or segment images, their weights and training.",
    )
    parser.add_argument("--version", action=_PrintVersion, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    for subparser in commands.choices.values():
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(commands=tuple(commands.choices))
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports an unknown option before missing arguments, and a missing KIND with its choices."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is not None:  # the options behind the command are for its own parser
            words = list(takewhile(lambda word: word.startswith("-"), words))
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for word in takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and not any(known.startswith(name) for known in options):
                (near,) = nearest(name, options, 1)
                self.error(f"there is no option {printable(name)}; did you mean {near}? ({self.prog} --help lists all)")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message:
            for action in self._get_positional_actions():
                if action.choices is not None and isinstance(action.metavar, str):
                    message = message.replace(action.metavar, f"{action.metavar} ({', '.join(action.choices)})", 1)
        super().error(message)


class _PrintVersion(argparse.Action):
    """Prints the version, also in a checkout that is not installed; it is looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            print(f"zoo {metadata.version('zoo')}")
        except metadata.PackageNotFoundError:
            print("zoo of a checkout that is not installed")
        parser.exit()


def _known_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> Sequence[str]:
    """Return the arguments, ``help`` as ``--help``; end with code 2 and the nearest names for an unknown command."""
    known = parser.get_default("commands")
    if not words or words[0].startswith("-") or words[0] in known:
        return words
    if words[0] == "help":
        return [*words[1:2], "--help"]
    near = " or ".join(nearest(words[0], known, 2))
    parser.error(f"there is no command {printable(words[0])!r}; did you mean {near}? (zoo --help lists all)")


def _rank() -> int:
    """Return this process's rank for its log; 0 if RANK is no number, which distributed commands refuse later."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _print_error(args: argparse.Namespace, message: str) -> None:
    if args.debug:
        traceback.print_exc()
    # A message may have several lines; whatever else a terminal would obey is escaped.
    print(f"zoo {args.command}:", "\n".join(map(printable, message.split("\n"))), file=sys.stderr)


def _reader_has_left() -> bool:
    """Return whether nobody reads standard output any more; otherwise another pipe of the command is broken."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
