"""``zoo reproduce``: measure published numbers and write them next to the published values."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

from zoo.cli.options import add_loader_options, add_process_options, add_workers_option, positive
from zoo.errors import EXIT_USER_ERROR, EXIT_VERIFICATION_FAILED
from zoo.reproduce import OUT
from zoo.tasks.protocols import PROTOCOLS

RUNS_HELP = (
    "log folders of zoo train, whose accuracies fill the tables and whose curves are saved in PAPER_runs.json and "
    "plotted; or such files instead of the folders"
)
# Listed here, because zoo.reproduce.papers imports torch.
PAPERS = {
    "all": "every published number of the three papers",
    "inplace_abn": "the InPlace-ABN paper",
    "revnet": "the RevNet paper",
    "revnext": "the RevNeXt paper",
}
DATA_HELP = {
    "all": "ImageNet or CIFAR-10, as train/ and val/ with a folder per class",
    "inplace_abn": "ImageNet, as train/ and val/ with a folder per class, to score the published networks on",
    "revnet": "CIFAR-10, as train/ and val/ with a folder per class (default: random images)",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``reproduce`` and its subcommands."""
    parser = commands.add_parser("reproduce", help="measure published scores, tables and figures again")
    benchmarks = parser.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", required=True, help="what to reproduce; see BENCHMARK --help"
    )
    for name, meaning in PAPERS.items():
        paper = benchmarks.add_parser(name, help=f"{meaning}; takes minutes on a CPU")
        _add_paper_options(paper, name)
        paper.set_defaults(reproduce=_reproduce_papers)
    imagenet = benchmarks.add_parser(
        "imagenet",
        help="published ImageNet classification scores",
        description="Exit code: 0 if everything was measured, 2 if something is missing, 3 if a score is off by more "
        "than 0.1 points.",
    )
    _add_imagenet_options(imagenet)
    imagenet.set_defaults(reproduce=_reproduce_imagenet)
    for subparser in benchmarks.choices.values():
        subparser.add_argument(
            "--out", metavar="DIR", type=Path, default=OUT,
            help="folder of the reports; rows measured there earlier are kept (default: %(default)s)",
        )  # fmt: skip
        subparser.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
    parser.set_defaults(run=run)


def _add_paper_options(parser: argparse.ArgumentParser, name: str) -> None:
    if name in DATA_HELP:
        parser.add_argument("--data", metavar="DIR", type=Path, help=DATA_HELP[name])
    if name != "inplace_abn":
        parser.add_argument("--runs", metavar="PATH", nargs="+", type=Path, default=[], help=RUNS_HELP)
    if name in ("all", "inplace_abn"):
        add_workers_option(parser, 4, "processes that read the images of ImageNet")
    parser.add_argument(
        "--item", metavar="ITEM", nargs="+", default=[],
        help='measure only these, such as "Table 1" or table1 (default: all tables, figures and sections)',
    )  # fmt: skip
    parser.add_argument("--no-picture", action="store_true", help="do not draw plots, which need matplotlib")


def _add_imagenet_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", type=Path, required=True, help="ImageNet, as val/ with a folder per class"
    )
    parser.add_argument(
        "--models", metavar="NAME", nargs="+", default=["*"],
        help="published networks or shell-style patterns (default: all), and checkpoints of zoo train, which are "
        "scored with their own crop",
    )  # fmt: skip
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, help="evaluation protocols (default: all)")
    parser.add_argument(
        "--limit", type=positive, metavar="N",
        help="score only N evenly spaced images, to try the command; gives no verdict",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="images per batch and process (default: the experiment's batch divided by the number of processes)",
    )  # fmt: skip
    add_loader_options(parser, workers=4)
    add_process_options(parser)


def run(args: argparse.Namespace) -> int:
    """Reproduce what was asked for and return the exit code."""
    code: int = args.reproduce(args)
    return code


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
    """Measure the tables and figures of one paper and print its report, or of all papers and print counts."""
    if "torch" not in sys.modules:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the memory profiler
    from zoo.reproduce.paper_run import PaperOptions, reproduce_papers
    from zoo.reproduce.scoreboard import count_sentence

    given = {name: value for name in ("data", "runs", "workers") if (value := getattr(args, name, None)) is not None}
    options = PaperOptions(
        args.benchmark,
        items=args.item,
        plots=not args.no_picture,
        out=args.out,
        command_line=args.command_line,
        **given,
    )
    reproduced = reproduce_papers(options)
    if args.benchmark != "all":
        print(*reproduced.reports.values())
    for paper in reproduced.reports:
        print(f"written to {args.out / paper}.md and .json, plots beside them")
    print(f"{count_sentence(reproduced.rows)} All rows: {args.out / 'REPRODUCTION.md'}, reproduction.csv and .json")
    return 0
