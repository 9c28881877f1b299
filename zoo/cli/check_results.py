"""``zoo results``: whether the files of measured numbers can be believed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import shlex
from pathlib import Path

from zoo.errors import ConfigError, VerificationError, printable

ROOT = Path(__file__).parents[2]
RESULTS = Path("docs", "results")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``results`` and its one kind."""
    parser = commands.add_parser("results", help="check files of measured numbers")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to do: see KIND --help")
    check = kinds.add_parser(
        "check", help="find results that cannot be measured again or are out of date, and figures of no file in pages",
        description="Exit code: 0, or 3 if a file lacks its commit, command, environment or date, is of a checkout "
        "with changes, has a command that zoo does not understand or a text that is not made of it, and if a page of "
        "the documentation has figures of no file. What is only out of date is printed and changes no exit code.",
    )  # fmt: skip
    check.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?",
        help="folder of the files (default: docs/results of the checkout that zoo runs from, with its pages)",
    )  # fmt: skip
    check.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what is out of date and what is wrong; returns 0, or raises VerificationError if anything is wrong."""
    from zoo.reproduce.page_figures import unbacked_figures
    from zoo.reproduce.stored_results import check_results

    folder = args.folder or ROOT / RESULTS
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {printable(folder)}; give FOLDER, the place of the files")
    findings = check_results(folder, fault_of_command)
    if args.folder is None:
        findings.faults += unbacked_figures(ROOT)
    lines = [*(f"remark: {remark}" for remark in findings.remarks), *(f"fault: {fault}" for fault in findings.faults)]
    print("\n".join([*map(printable, lines), f"{findings.num_files} files of results, {len(findings.faults)} faults"]))
    if any(": out of date: " in remark for remark in findings.remarks):
        print(
            "out of date: code that the numbers may depend on has changed since they were measured. The README and "
            "docs show them as measured on that commit; the command in the file measures them again."
        )
    if findings.faults:
        raise VerificationError(f"{len(findings.faults)} faults, listed above; {printable(folder)}: mend them")
    return 0


@functools.cache
def fault_of_command(command: str) -> str | None:
    """Return why the command line does not understand a command, None if it does."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _parser().parse_args(shlex.split(command)[1:])
    except ValueError as error:
        return str(error)
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2]
    return None


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from zoo.cli import build_parser

    return build_parser()
