"""``zoo reproduce``: measure published numbers again, and write both side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from zoo.cli import reproduce_reversible
from zoo.cli.options import add_loader_options, add_process_options, positive
from zoo.engine.protocols import PROTOCOLS
from zoo.reproduce import imagenet
from zoo.reproduce.imagenet import OUT

BENCHMARKS = {
    "imagenet": imagenet.run,
    "revnet": reproduce_reversible.run,
    "revnext": reproduce_reversible.run,
}
# The options that the benchmarks have, beside --out and --debug.
COMMON = ("benchmark", "out", "debug", "command", "run", "parser")
REVERSIBLE = {"revnet": ("data", "runs", "no_picture"), "revnext": ("runs", "no_picture")}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``reproduce``."""
    parser = commands.add_parser(
        "reproduce",
        help="measure published scores, tables and figures again",
        description="Exit code of imagenet: 0 everything was measured, 2 something is missing, 3 a score is off by "
        "more than 0.1. Of the others: 0, what could not be run is listed with the command for it.",
    )
    parser.add_argument(
        "benchmark", metavar="BENCHMARK", choices=BENCHMARKS,
        help="imagenet: classification; revnet, revnext: the tables and figures of the two papers about reversible "
        "networks, in minutes on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="DIR", type=Path,
        help="imagenet: folder with val/, one folder per class, required; revnet: folder with train/ of 32-pixel "
        "images for Figure 4 (default: random images)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=OUT,
        help="where BENCHMARK.md, BENCHMARK.json and plots are written; of imagenet after each row, and rows "
        "already measured there with the same weights and data are reused (default: %(default)s)",
    )  # fmt: skip
    _add_reversible(parser.add_argument_group("revnet and revnext"))
    _add_imagenet(parser)
    parser.set_defaults(run=run, parser=parser)


def _add_reversible(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runs", metavar="PATH", nargs="+", type=Path, default=[],
        help="log folders of zoo train, whose accuracies fill the tables and whose curves are kept in "
        "BENCHMARK_runs.json and drawn; or such files, which stand for the folders",
    )  # fmt: skip
    group.add_argument("--no-picture", action="store_true", help="write no plots, which need matplotlib")


def _add_imagenet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", metavar="NAME", nargs="+", default=["*"],
        help="published networks, shell-style patterns too (default: all), and checkpoints of zoo train to score "
        "beside them with their own crop",
    )  # fmt: skip
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, help="published ways to score (default: all)")
    parser.add_argument(
        "--limit", type=positive, metavar="N",
        help="score only N images, spread evenly over the data: to try it out, without a verdict",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="images at once and process (default: the experiment's over the number of processes)",
    )  # fmt: skip
    add_loader_options(parser, workers=4)
    add_process_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code; options that it does not have end the process, as argparse does."""
    if args.benchmark == "imagenet" and args.data is None:
        args.parser.error("the following arguments are required: --data")
    foreign = [*REVERSIBLE["revnext"]] if args.benchmark == "imagenet" else _options_besides(args)
    for action in args.parser._actions:
        if action.dest in foreign and getattr(args, action.dest) != action.default:
            args.parser.error(f"{args.benchmark} has no option {action.option_strings[-1]}")
    return BENCHMARKS[args.benchmark](args)


def _options_besides(args: argparse.Namespace) -> list[str]:
    return [name for name in vars(args) if name not in (*COMMON, *REVERSIBLE[args.benchmark])]
