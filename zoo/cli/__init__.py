"""The command line: ``zoo`` and ``python -m zoo``, one file per command.

Nothing here imports torch before a command runs, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from zoo.cli import benchmark, convert, doctor, fetch, models, predict, quickstart, reproduce, train, validate
from zoo.errors import ZooError
from zoo.report.console import set_up_console

COMMANDS = (models, fetch, train, validate, convert, predict, reproduce, benchmark, quickstart, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or the ``exit_code`` of the ZooError that it raised.

    ``argv`` defaults to the arguments of the process. A ZooError is printed on stderr, without a traceback
    unless ``--debug`` is given; wrong arguments end the process with code 2, as argparse does.
    """
    args = build_parser().parse_args(argv)
    # Threads that spin while they wait make a step many times slower as soon as anything else wants a core. Read when
    # torch is imported, which has not happened yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_up_console(rank=int(os.environ.get("RANK", "0")))
    try:
        code: int = args.run(args)
    except ZooError as error:
        if args.debug:
            traceback.print_exc()
        print(f"zoo {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="zoo", description="ImageNet networks, their weights and training.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    for subparser in commands.choices.values():
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
