"""``zoo train``: train the network of an experiment file on a folder of pictures, or only evaluate it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_loader_options, add_process_options
from zoo.errors import ConfigError

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.data.loader import Loader
    from zoo.data.sampler import TrainBatches, ValBatches
    from zoo.engine.process import Process


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``train``, with the arguments of the original training script."""
    parser = commands.add_parser("train", help="train an experiment on DATA/train, validate on DATA/val")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="an experiment file")
    parser.add_argument(
        "data", metavar="DATA", type=Path, help="folder with train/ and val/, each with one folder per class"
    )
    add_loader_options(parser, workers=2)
    parser.add_argument(
        "--resume", metavar="PATH",
        help="continue from a checkpoint; 'auto' takes the newest good one of the log folder, if there is one",
    )  # fmt: skip
    parser.add_argument("--weights", metavar="FILE", help="begin with these weights instead of random ones")
    parser.add_argument(
        "-e", "--evaluate", action="store_true", help="only score the weights of --weights or --resume on DATA/val"
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path, default=Path(),
        help="where checkpoints, text log, metrics.jsonl and TensorBoard events go (default: this folder)",
    )  # fmt: skip
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
    from zoo.config import load_experiment
    from zoo.engine.process import open_process

    if not args.evaluate:
        config = load_experiment(args.config)
        with open_process(args.local_rank, args.dist_backend) as process:
            train_experiment(config, process, args)
        return 0
    return _evaluate(args)


def _evaluate(args: argparse.Namespace) -> int:
    """Score given weights by the experiment's own protocol; the original scored random ones without a word."""
    from zoo.cli.scoring import load_subject, score
    from zoo.engine.checkpoint import CHECKPOINT
    from zoo.engine.process import open_process
    from zoo.report.results import results_table

    given = [args.log_dir / CHECKPOINT if path == "auto" else path for path in (args.resume, args.weights) if path]
    if len(given) != 1:
        raise ConfigError(
            f"--evaluate with {len(given)} sources of weights; command line: give one, --weights FILE or --resume PATH"
        )
    with open_process(args.local_rank, args.dist_backend) as process:
        subject = load_subject(str(args.config), Path(given[0]))
        options = {"workers": args.workers, "on_bad_image": args.on_bad_image, "print_freq": args.print_freq}
        result = score(subject, subject.own_protocol, process, args.data, **options)
        if process.is_main:
            print(results_table(subject.title, [result], subject.experiment.expected))
    return 0


def train_experiment(config: Experiment, process: Process, args: argparse.Namespace) -> None:
    """Train in ``args.log_dir``, or go on there if ``args.resume`` says so; says so if nothing is left to do.

    Of ``args`` this reads everything but config, evaluate and what opens the process.
    """
    from zoo.engine.loop import train
    from zoo.engine.start import start
    from zoo.report.writers import RunLog

    with RunLog(args.log_dir, process.rank, config, histograms=args.log_hist) as log:
        state = start(
            config,
            process,
            args.log_dir,
            log,
            resume=args.resume,
            weights=args.weights,
            allow_world_size_change=args.allow_world_size_change,
        )
        if state.epoch >= config.optimizer.schedule.epochs:
            log.message(f"all {config.optimizer.schedule.epochs} epochs are done; {args.log_dir}: nothing to train")
            return
        loaders = _build_loaders(config, process, args)
        log.begin(state.step, process.device, process.world_size)
        train(state, *loaders, log, args.log_dir, log_interval=args.print_freq)


def _build_loaders(
    config: Experiment, process: Process, args: argparse.Namespace
) -> tuple[Loader[TrainBatches], Loader[ValBatches]]:
    """Return the loaders of DATA/train and DATA/val; DataError unless both have the same classes."""
    from zoo.data.folder import check_classes
    from zoo.data.loader import build_train_loader, build_val_loader

    shares = {"rank": process.rank, "world_size": process.world_size, "workers": args.workers,
              "pin_memory": process.device.type == "cuda", "on_bad_image": args.on_bad_image}  # fmt: skip
    train_loader = build_train_loader(args.data, config, **shares)
    val_loader = build_val_loader(
        args.data,
        scale=config.input.scale_val,
        crop=config.input.crop_val,
        mean=config.input.mean,
        std=config.input.std,
        batch_size=max(1, config.optimizer.batch_size // process.world_size),
        **shares,
    )
    check_classes(train_loader.dataset, val_loader.dataset)
    return train_loader, val_loader
