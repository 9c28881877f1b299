"""``zoo train``: train the network of an experiment on a folder of images, or only evaluate it."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.cli.options import add_loader_options, add_process_options
from zoo.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from zoo.config import Experiment
    from zoo.data.loader import Loader
    from zoo.data.sampler import TrainBatches, ValBatches
    from zoo.engine.process import Process
    from zoo.engine.state import TrainState

logger = logging.getLogger(__name__)

RUNS = Path("runs")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``train``, with the arguments of the original training script."""
    parser = commands.add_parser("train", help="train an experiment on DATA/train, validate on DATA/val")
    parser.add_argument("config", metavar="CONFIG", help="the name of a bundled experiment, or an experiment file")
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
        "--log-dir", metavar="DIR", type=Path,
        help="where checkpoints, settings, text log, metrics.jsonl and TensorBoard events go (default: runs/ and the "
        "experiment's name)",
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
    from zoo.config import load_experiment
    from zoo.engine.process import open_process

    args.log_dir = args.log_dir or RUNS / Path(args.config).stem
    if not args.evaluate:
        config = load_experiment(args.config)
        with open_process(args.local_rank, args.dist_backend) as process:
            train_experiment(config, process, args)
        return 0
    return _evaluate(args)


def _evaluate(args: argparse.Namespace) -> int:
    """Score given weights by the experiment's own protocol; the original scored random ones without a word."""
    from zoo.engine.process import open_process
    from zoo.engine.resume import AUTO
    from zoo.report.tables import results_table
    from zoo.scoring import load_subject, score

    given = [path for path in (args.resume, args.weights) if path]
    if len(given) != 1:
        raise ConfigError(
            f"--evaluate with {len(given)} sources of weights; command line: give one, --weights FILE or --resume PATH"
        )
    with open_process(args.local_rank, args.dist_backend) as process:
        weights = _newest(args.log_dir) if args.resume == AUTO else Path(given[0])
        subject = load_subject(args.config, weights)
        options = {"workers": args.workers, "on_bad_image": args.on_bad_image, "print_freq": args.print_freq}
        result = score(subject, subject.own_protocol, process, args.data, **options)
        if process.is_main:
            print(results_table(subject.title, [result], subject.experiment.expected))
    return 0


def _newest(log_dir: Path) -> Path:
    """Return the newest good checkpoint of a log folder, and say so where that is not the last one written."""
    from zoo.engine.resume import newest_checkpoint

    found = newest_checkpoint(log_dir)
    if found is None:
        raise ConfigError(
            f"there is no checkpoint to evaluate; {printable(log_dir)}: give the folder of a run as --log-dir, or the "
            "path of a file as --resume or --weights"
        )
    for notice in found.notices:
        logger.info("%s", notice)
    return found.path


def train_experiment(config: Experiment, process: Process, args: argparse.Namespace) -> None:
    """Train in ``args.log_dir``, or go on there if ``args.resume`` says so; says so if nothing is left to do.

    Of ``args`` this reads everything but config, evaluate and what opens the process. Nothing is written before
    settings, images and network are known to be good, and the same on all processes.
    """
    from zoo.config import check_world_size
    from zoo.engine.loop import train
    from zoo.engine.start import start
    from zoo.report.log_folder import check_place, log_folder
    from zoo.report.run_log import RunLog, kept_records

    _check_settings_agree(config, process, args)
    check_world_size(config, process.world_size)
    process.on_main(lambda: check_place(args.log_dir, args.data))
    with kept_records() as earlier:
        loaders = _build_loaders(config, process, args)
    _check_images_agree(process, *loaders)
    num_parameters = _count_parameters(config)
    continues = args.resume is not None and _is_in(args.log_dir, args.resume)
    with (
        log_folder(args.log_dir, process, continues=continues, overwrite=args.overwrite),
        RunLog(args.log_dir, process.rank, config, histograms=args.log_hist, earlier=earlier) as log,
    ):
        state = start(
            config,
            process,
            args.log_dir,
            log,
            resume=args.resume,
            weights=args.weights,
            allow_world_size_change=args.allow_world_size_change,
        )
        epochs = config.optimizer.schedule.epochs
        if state.epoch >= epochs:
            log.message(f"all {epochs} epochs are done; {printable(args.log_dir)}: nothing to train")
        else:
            log.message(_begin_summary(state, num_parameters, *loaders, args))
            log.begin(state.step, process.device, process.world_size)
            train(state, *loaders, log, args.log_dir, log_interval=args.print_freq)
        log.message(_end_summary(state, args))


def _check_settings_agree(config: Experiment, process: Process, args: argparse.Namespace) -> None:
    from zoo.engine.agreement import check_agreement, program_facts

    check_agreement(
        process,
        lambda: {
            **program_facts(process, "train"),
            **config.model_dump(mode="json", exclude={"expected"}),
            "--on-bad-image": args.on_bad_image,
            "--print-freq": args.print_freq,
            "--allow-world-size-change": args.allow_world_size_change,
        },
        "give every process the same experiment, options and version of zoo",
    )


def _check_images_agree(process: Process, train_loader: Loader[TrainBatches], val_loader: Loader[ValBatches]) -> None:
    from zoo.engine.agreement import check_agreement, image_facts

    check_agreement(
        process,
        lambda: {
            name: image_facts(loader.dataset, loader.batch_sampler.num_images)
            for name, loader in (("train", train_loader), ("val", val_loader))
        },
        "copy the same DATA to every machine",
        DataError,
    )


def _count_parameters(config: Experiment) -> int:
    """Return the number of parameters; ConfigError for a network that does not exist. Nothing is allocated."""
    import torch

    from zoo.registry import build_from_config

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_from_config(config.network).parameters())


def _is_in(log_dir: Path, resume: str) -> bool:
    """Whether a resume goes on with the very run of the log folder."""
    from zoo.engine.resume import AUTO

    # Unlike Path.resolve this takes links that lead in a circle.
    return resume == AUTO or os.path.dirname(os.path.realpath(resume)) == os.path.realpath(log_dir)


def _begin_summary(
    state: TrainState,
    num_parameters: int,
    train_loader: Loader[TrainBatches],
    val_loader: Loader[ValBatches],
    args: argparse.Namespace,
) -> str:
    """Return what is about to be trained, on what and where, a line for each."""
    config, process = state.config, state.process
    network, optimizer = config.network, config.optimizer
    num_images = [loader.batch_sampler.num_images for loader in (train_loader, val_loader)]
    processes = f"{process.world_size} process{'es' * (process.world_size > 1)}"
    lines = [
        f"training {network.arch}: {num_parameters:,} parameters, {network.bn_mode} norms with {network.activation}, "
        f"{network.classes} classes",
        f"images      {num_images[0]:,} to train on, {num_images[1]:,} to validate on; {printable(args.data)}",
        f"schedule    {optimizer.schedule.epochs} epochs of {len(train_loader)} steps, batch {optimizer.batch_size}",
        f"device      {process.device}, {processes}",
        f"log folder  {printable(args.log_dir)}",
    ]
    return "\n".join(lines)


def _end_summary(state: TrainState, args: argparse.Namespace) -> str:
    """Return the best score and, if the names can be printed as they are, the commands that a user may want next."""
    from zoo.engine.checkpoint import BEST

    best, data = str(args.log_dir / BEST), str(args.data)
    after = "" if state.best_epoch is None else f" after epoch {state.best_epoch + 1}"
    lines = [f"best top-1 {state.best_top1:.2f} %{after}; {printable(best)}"]
    if printable(best + data) == best + data:  # with escapes in them the commands would name files that do not exist
        lines += [
            f"score it    zoo validate {shlex.quote(best)} {shlex.quote(data)}",
            f"use it      zoo predict {shlex.quote(best)} IMAGE",
        ]
    return "\n".join(lines)


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
