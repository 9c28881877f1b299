"""``zoo reproduce``: measure published numbers again, and write both side by side."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

from zoo.cli.options import add_loader_options, add_process_options, positive
from zoo.errors import EXIT_USER_ERROR, EXIT_VERIFICATION_FAILED
from zoo.reproduce import OUT
from zoo.tasks.protocols import PROTOCOLS

PAPERS = ("inplace_abn", "revnet", "revnext")  # named here too, so that help needs no torch


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``reproduce``."""
    parser = commands.add_parser(
        "reproduce",
        help="measure published scores, tables and figures again",
        description="Exit code of imagenet: 0 if everything was measured, 2 if something is missing, 3 if a score is "
        "off by more than 0.1 points. Of the others: 0; what could not be run is listed with the command for it.",
    )
    parser.add_argument(
        "benchmark", metavar="BENCHMARK", choices=("all", *PAPERS, "imagenet"),
        help="all: every published number of three papers; inplace_abn, revnet, revnext: those of one of them, which "
        "takes minutes on a CPU; imagenet: published classification scores",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="DIR", type=Path,
        help="a folder with train/ and val/, each with a folder per class. imagenet: required; all: ImageNet or "
        "CIFAR-10; inplace_abn: ImageNet, which the published networks are scored on first; revnet: CIFAR-10 (default: "
        "random images)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=OUT,
        help="where BENCHMARK.md, BENCHMARK.json and plots are written, and REPRODUCTION.md, a row for every published "
        "number, with its .json, .csv and .html; what was measured there before is kept (default: %(default)s)",
    )  # fmt: skip
    _add_paper_options(parser.add_argument_group("all, inplace_abn, revnet and revnext"))
    _add_imagenet_options(parser)
    parser.set_defaults(run=run, parser=parser)


def _add_paper_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runs", metavar="PATH", nargs="+", type=Path, default=[],
        help="all, revnet, revnext: log folders of zoo train, whose accuracies fill the tables and whose curves are "
        "kept in PAPER_runs.json and drawn; or such files in place of the folders",
    )  # fmt: skip
    group.add_argument(
        "--item", metavar="ITEM", nargs="+", default=[],
        help='measure these alone, such as "Table 1" or table1 (default: all tables, figures and sections)',
    )  # fmt: skip
    group.add_argument("--no-picture", action="store_true", help="write no plots, which need matplotlib")


def _add_imagenet_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", metavar="NAME", nargs="+", default=["*"],
        help="published networks, shell-style patterns too (default: all), and checkpoints of zoo train, which are "
        "scored with their own crop",
    )  # fmt: skip
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, help="published ways to score (default: all)")
    parser.add_argument(
        "--limit", type=positive, metavar="N",
        help="score only N images, spread evenly over the data, to try the command out; there is then no verdict",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="images at once per process (default: the experiment's over the number of processes)",
    )  # fmt: skip
    add_loader_options(parser, workers=4)
    add_process_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code; options that it does not have end the process, as argparse does."""
    for action in args.parser._actions:
        is_given = getattr(args, action.dest, action.default) != action.default
        if is_given and not _has_option(args.benchmark, action.dest):
            args.parser.error(f"{args.benchmark} has no option {action.option_strings[-1]}")
    if args.benchmark == "imagenet" and args.data is None:
        args.parser.error("the following arguments are required: --data")
    return _reproduce_imagenet(args) if args.benchmark == "imagenet" else _reproduce_papers(args)


def _has_option(benchmark: str, name: str) -> bool:
    if benchmark == "imagenet":
        return name not in ("runs", "item", "no_picture")
    own = {"inplace_abn": ("data", "workers"), "revnet": ("data", "runs"), "revnext": ("runs",)}
    own["all"] = ("data", "runs", "workers")
    return name in ("benchmark", "out", "debug", "item", "no_picture", *own[benchmark])


def _reproduce_imagenet(args: argparse.Namespace) -> int:
    """Score the networks and print the report; returns the exit code."""
    from zoo.engine.process import open_process
    from zoo.reproduce.imagenet_scores import ImageNetOptions, reproduce_imagenet

    options = ImageNetOptions(**{field.name: getattr(args, field.name) for field in fields(ImageNetOptions)})
    with open_process(args.local_rank, args.dist_backend) as process:
        scored = reproduce_imagenet(options, process)
        if process.is_main:
            print(scored.markdown)
            print(f"written to {args.out / 'imagenet.md'} and {args.out / 'imagenet.json'}")
    if scored.is_off:
        return EXIT_VERIFICATION_FAILED
    return 0 if scored.is_complete else EXIT_USER_ERROR


def _reproduce_papers(args: argparse.Namespace) -> int:
    """Measure the tables and figures of papers, and print the report of one, or the counts of all; returns 0."""
    if "torch" not in sys.modules:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts bytes reports to stderr otherwise
    from zoo.reproduce.ledger import count_sentence
    from zoo.reproduce.paper_run import PaperOptions, reproduce_papers

    options = PaperOptions(args.benchmark, args.data, args.runs, args.item, not args.no_picture, args.workers, args.out)
    reproduced = reproduce_papers(options)
    if args.benchmark != "all":
        print(*reproduced.reports.values())
    for paper in reproduced.reports:
        print(f"written to {args.out / paper}.md and .json, plots beside them")
    print(
        f"{count_sentence(reproduced.rows)} All rows: {args.out / 'REPRODUCTION.md'}, reproduction.html, .csv and .json"
    )
    return 0
