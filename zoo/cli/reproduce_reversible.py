"""``zoo reproduce revnet`` and ``revnext``: tables and figures of two papers, measured beside the published ones."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.errors import ConfigError, printable

if TYPE_CHECKING:
    from zoo.reproduce.runs import Run
    from zoo.reproduce.schema import Section

logger = logging.getLogger(__name__)

TITLES = {
    "revnet": "The Reversible Residual Network (Gomez et al. 2017), measured again",
    "revnext": "Reversible designs for extreme memory cost reduction of CNN training (Hascoet et al. 2023), measured "
    "again",
}


def run(args: argparse.Namespace) -> int:
    """Measure one section after the other and write the report after each; returns 0."""
    if "torch" not in sys.modules:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts bytes reports to stderr otherwise
    from zoo.report.environment import warn_of_changes
    from zoo.report.plot_style import check_matplotlib
    from zoo.reproduce.run_files import draw_runs, write_runs
    from zoo.reproduce.writing import write_report

    if not args.no_picture:
        check_matplotlib()
    warn_of_changes()
    builders, runs, remarks = _builders(args)
    _make_folder(args.out)
    if any(path.is_dir() for path in args.runs):  # files of curves alone hold all that there is
        write_runs(args.out, args.benchmark, _command(args), runs)
    if runs and not args.no_picture:
        draw_runs(args.out, args.benchmark, runs)
    sections: list[Section] = []
    for build in builders:
        start_s = time.monotonic()
        section = build()
        section.seconds = round(time.monotonic() - start_s, 1)
        sections.append(section)
        text = write_report(
            args.out, args.benchmark, TITLES[args.benchmark], _command(args), sections, remarks,
            plots=not args.no_picture,
        )  # fmt: skip
        logger.info("%s (%.0f s)", section.title, section.seconds)
    print(text)
    print(f"written to {args.out / args.benchmark}.md and .json, plots beside them")
    return 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: this folder cannot be made ({error.strerror}); {printable(folder)}: give another"
        ) from error


def _builders(args: argparse.Namespace) -> tuple[list[Callable[[], Section]], list[Run], list[str]]:
    """Return the functions that measure the sections, in the order of the report, the runs, and remarks on others."""
    from zoo.reproduce.runs import read_runs

    if args.benchmark == "revnet":
        from zoo.reproduce import revnet

        runs, remarks = read_runs(args.runs, revnet.EXPERIMENTS)
        return revnet.revnet_sections(runs, args.data), runs, remarks
    from zoo.reproduce import revnext

    runs, remarks = read_runs(args.runs, revnext.EXPERIMENTS)
    return revnext.revnext_sections(runs), runs, remarks


def _command(args: argparse.Namespace) -> str:
    words = ["zoo", "reproduce", args.benchmark]
    words += ["--data", str(args.data)] if args.data is not None else []
    words += ["--runs", *map(str, args.runs)] if args.runs else []
    words += ["--out", str(args.out)] if args.out != args.parser.get_default("out") else []
    words += ["--no-picture"] if args.no_picture else []
    return shlex.join(words)
