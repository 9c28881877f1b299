"""``zoo train``: train the network of an experiment on a folder of images, or only evaluate it."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_loader_options, add_process_options, positive, whole_number
from zoo.data.places import Place, place_of
from zoo.errors import EXIT_NOT_FINITE, ConfigError, nearest, printable

if TYPE_CHECKING:
    from zoo.config import Experiment

logger = logging.getLogger(__name__)

RUNS = Path("runs")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``train``, with the arguments of the original training script."""
    parser = commands.add_parser("train", help="train an experiment on DATA/train, validate on DATA/val")
    parser.add_argument(
        "config", metavar="CONFIG",
        help="the name of a bundled experiment, an experiment file, or an architecture (also timm:NAME and "
        "torchvision:NAME), which is trained with default settings and the number of classes of DATA",
    )  # fmt: skip
    parser.add_argument(
        "data",
        metavar="DATA",
        type=place_of,
        help="folder with train/ and val/: in each a folder per class, or of segmentation images/ and labels/ (see "
        "segmentation.layout); or shards, also by their address (https://, s3://, gs://)",
    )
    add_loader_options(parser, workers=2)
    parser.add_argument(
        "--resume", metavar="PATH",
        help="continue from a checkpoint; 'auto' takes the newest good one of the log folder, if there is one",
    )  # fmt: skip
    parser.add_argument(
        "--epochs", metavar="N", type=positive,
        help="train for N epochs in place of the experiment's optimizer.schedule.epochs; with --resume, more epochs "
        "than before prolong the run, also a finished one",
    )  # fmt: skip
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="begin with these weights instead of random ones; a network that segments takes those of a classifier "
        "into its body",
    )
    parser.add_argument(
        "-e", "--evaluate", action="store_true", help="only score the weights of --weights or --resume on DATA/val"
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path,
        help="where checkpoints, settings, text log, metrics.jsonl and TensorBoard events go (default: runs/ and the "
        "experiment's name)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", metavar="N", type=whole_number, nargs="+",
        help="train once with each of these seeds in place of the experiment's, each in a log folder of its own "
        "(DIR-seedN), and write mean and spread of the scores to DIR-seeds.json",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="begin anew in a log folder that holds a run, which is removed"
    )
    parser.add_argument(
        "--log-hist", action="store_true", help="histograms of the classifier and the last norm in TensorBoard"
    )
    parser.add_argument(
        "--allow-world-size-change", action="store_true",
        help="resume with another number of processes, which gives another run in the last bits",
    )  # fmt: skip
    add_process_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, or with ``--evaluate`` only score; returns 0."""
    if args.overwrite and (args.resume or args.evaluate):
        raise ConfigError(
            "--overwrite removes the run that --resume and --evaluate need; command line: leave out one of them"
        )
    if args.epochs and args.evaluate:
        raise ConfigError("--evaluate scores weights and trains no epochs; command line: leave out --epochs")
    if args.seeds and (args.evaluate or args.resume not in (None, "auto")):
        raise ConfigError(
            "--seeds trains several runs, and --evaluate and --resume PATH are about one; command line: leave out one "
            "of them, or continue the runs of all seeds with --resume auto"
        )
    args.log_dir = args.log_dir or RUNS / Path(args.config).name.removesuffix(".json")
    return _evaluate(args) if args.evaluate else _train(args)


def _train(args: argparse.Namespace) -> int:
    from zoo.engine.process import open_process
    from zoo.run.seeds import seeds_table
    from zoo.run.training import TrainOptions, train_experiment, train_seeds
    from zoo.tasks import task_of

    config = _experiment(args.config, args.data, args.epochs)
    options = TrainOptions(
        workers=args.workers,
        on_bad_image=args.on_bad_image,
        log_interval=args.print_freq,
        resume=args.resume,
        weights=args.weights,
        overwrite=args.overwrite,
        histograms=args.log_hist,
        allow_world_size_change=args.allow_world_size_change,
    )
    with open_process(args.local_rank, args.dist_backend) as process:
        if not args.seeds:
            train_experiment(config, args.data, args.log_dir, process, options)
            return 0
        runs = train_seeds(config, args.data, args.log_dir, process, args.seeds, options, args.command_line)
        if process.is_main:
            print(seeds_table(task_of(config).shown_labels, runs))
    return EXIT_NOT_FINITE if any(run.fault for run in runs) else 0


def _experiment(name: str, data: Place, epochs: int | None) -> Experiment:
    """Return the experiment of that name, or for the name of an architecture the default one, which is logged.

    It has the given number of ``epochs``, or its own for None. Raises ConfigError, with the nearest names, if there is
    neither.
    """
    from zoo.architectures import ARCHITECTURES, is_external
    from zoo.config import differences, experiment_names, find_experiment, load_experiment
    from zoo.registry import default_experiment
    from zoo.run.training import with_epochs

    is_file = find_experiment(name) is not None or (Path(name).exists() and not Path(name).is_dir())
    if not is_file and name not in ARCHITECTURES and not is_external(name):
        raise ConfigError(
            f"there is no experiment, experiment file or architecture called {printable(name)}; the nearest "
            f"experiments are {', '.join(nearest(name, experiment_names()))}, the nearest architectures "
            f"{', '.join(nearest(name, ARCHITECTURES))}"
        )
    config = load_experiment(name) if is_file else default_experiment(name, data)
    if epochs is not None:
        config = with_epochs(config, epochs)
    if not is_file:
        settings = "".join(f"\n  {key} = {json.dumps(value)}" for key, value in differences(config).items())
        logger.info(
            "%s is an architecture, not an experiment, and is trained with default settings. experiment.json in the "
            "log folder will hold all of them; zoo train accepts an edited copy of that file. Settings that differ "
            "from the defaults of experiment files:%s",
            name, settings,
        )  # fmt: skip
    return config


def _evaluate(args: argparse.Namespace) -> int:
    """Score the given weights by the experiment's own protocol; the original would silently score random weights."""
    from zoo.engine.process import open_process
    from zoo.engine.start import AUTO
    from zoo.run.results_table import results_table
    from zoo.run.scoring import load_network, score

    sources = [path for path in (args.resume, args.weights) if path]
    if len(sources) != 1:
        raise ConfigError(
            f"--evaluate with {len(sources)} sources of weights; command line: give one, --weights FILE or "
            "--resume PATH"
        )
    with open_process(args.local_rank, args.dist_backend) as process:
        weights = _newest(args.log_dir) if args.resume == AUTO else Path(sources[0])
        subject = load_network(args.config, weights)
        options = {"workers": args.workers, "on_bad_image": args.on_bad_image, "print_freq": args.print_freq}
        result = score(subject, args.data, process=process, **options)
        if process.is_main:
            print(results_table(subject.title, [result], subject.experiment.expected))
    return 0


def _newest(log_dir: Path) -> Path:
    """Return the newest good checkpoint of a log folder, and log it if that is not the last one written."""
    from zoo.engine.start import load_newest_checkpoint

    newest = load_newest_checkpoint(log_dir)
    if newest is None:
        raise ConfigError(
            f"there is no checkpoint to evaluate; {printable(log_dir)}: give the folder of a run as --log-dir, or the "
            "path of a file as --resume or --weights"
        )
    for notice in newest.notices:
        logger.info("%s", notice)
    return newest.path
