"""``zoo data``: what is in a data folder, and what is wrong with it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_workers_option
from zoo.errors import DataError, printable

if TYPE_CHECKING:
    from zoo.data.check import SplitReport
    from zoo.report.tables import Cell


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``data`` and its one kind."""
    parser = commands.add_parser("data", help="look at a data folder")
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to do: see KIND --help")
    check = kinds.add_parser(
        "check", help="read every image and label map of DATA; print sizes, classes, and everything that is wrong"
    )
    check.add_argument("config", metavar="CONFIG", help="an experiment that is to train on them: its file or name")
    check.add_argument("data", metavar="DATA", type=Path, help="folder of the images, as for zoo train")
    add_workers_option(check, 4, "threads that read files")
    check.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read all images, print what is in them and all faults; returns 0, or raises DataError if there are faults."""
    from zoo.config import load_experiment
    from zoo.data.check import check_data
    from zoo.report.console import Progress

    config = load_experiment(args.config)
    reports = check_data(config, args.data, args.workers, lambda split, total: Progress(split, total, unit="images"))
    print("\n\n".join(_described(report) for report in reports))
    num_faults = sum(len(report.faults) for report in reports)
    if num_faults:
        raise DataError(
            f"{_counted(num_faults, 'fault')}, listed above; {printable(args.data)}: mend or remove these files, and "
            "check again"
        )
    return 0


def _described(report: SplitReport) -> str:
    """Return what is in a split, the table of its classes, and its faults."""
    images, faults = _counted(report.num_images, "image"), _counted(len(report.faults), "fault")
    lines = [f"{report.split}: {images}{_sizes(report.sizes)}, {faults}"]
    if report.num_images:
        lines += ["", _table(report)]
    lines += ["", *(f"fault: {printable(fault)}" for fault in report.faults)] if report.faults else []
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    if not sizes:
        return ""
    (width, height), (most_width, most_height) = (
        chosen(sizes, key=lambda size: size[0] * size[1]) for chosen in (min, max)
    )
    if len(sizes) == 1:
        return f" of {width} x {height} px"
    return f" in {len(sizes):,} sizes, from {width} x {height} to {most_width} x {most_height} px"


def _table(report: SplitReport) -> str:
    """Return the classes with the images that hold them, and with the share of the pixels that they have."""
    from zoo.report.tables import markdown_table

    counted = zip(report.classes, report.images, strict=True)
    rows: list[list[Cell]] = [[printable(name), int(count)] for name, count in counted]
    if report.pixels is None:
        return markdown_table(["class", "images"], rows)
    shares = 100 * report.pixels / max(1, report.pixels.sum())
    rows.append(["(void)", None])
    rows = [[number, *row, float(share)] for number, (row, share) in enumerate(zip(rows, shares, strict=True))]
    rows[-1][0] = None
    return markdown_table(["number", "class", "images with it", "pixels, %"], rows)
