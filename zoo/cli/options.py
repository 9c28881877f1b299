"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zoo.errors import ConfigError, printable


def add_loader_options(parser: argparse.ArgumentParser, workers: int) -> None:
    """Add the options about reading images and printing progress; ``workers`` limits the default of --workers."""
    add_workers_option(parser, workers, "processes that read images, for each process of the run")
    parser.add_argument(
        "-p", "--print-freq", type=positive, default=10, metavar="N",
        help="batches between two lines of the log (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--on-bad-image", choices=("stop", "skip"), default="stop",
        help="what to do with an image that cannot be read: end with its name (stop), or leave it out, count it and "
        "report it (skip) (default: %(default)s)",
    )  # fmt: skip


def add_workers_option(parser: argparse.ArgumentParser, workers: int, meaning: str) -> None:
    """Add --workers, the number of what ``meaning`` says; ``workers`` limits its default."""
    parser.add_argument(
        "-j", "--workers", type=whole_number, default=min(workers, _available_cores()), metavar="N",
        help=f"{meaning} (default: the number of cores, at most {workers}; here %(default)s)",
    )  # fmt: skip


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Add --weights, in place of the weights that belong to the command's NAME."""
    parser.add_argument(
        "--weights", metavar="FILE", type=Path, help="weights: a file or a published name (default: those of NAME)"
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the launcher or its user passes to each process."""
    parser.add_argument(
        "--local_rank", "--local-rank", type=whole_number, default=None, metavar="N",
        help="index of this process on its machine, which torch.distributed.launch passes "
        "(torchrun sets LOCAL_RANK instead)",
    )  # fmt: skip
    parser.add_argument(
        "--dist-backend", choices=("nccl", "gloo"), default=None,
        help="how the processes exchange tensors (default: nccl with CUDA, gloo without)",
    )  # fmt: skip


def check_writable(*files: Path | None) -> None:
    """Raise ConfigError for a file that could not be written after the work, and for one that is given twice.

    Missing folders do not matter.
    """
    places = [os.path.realpath(file) for file in files if file is not None]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ConfigError(f"{printable(twice)}: two options name this file; give each a file of its own")
    for file in files:
        if file is None:
            continue
        folder = next(parent for parent in file.absolute().parents if os.path.exists(parent))
        if os.path.isdir(file) or not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            no_place = f"{printable(folder)} is no folder that can be written to"
            obstacle = "it is a folder" if os.path.isdir(file) else no_place
            raise ConfigError(f"{printable(file)}: cannot be written, as {obstacle}; give another place")


def whole_number(text: str) -> int:
    """Return ``text`` as an integer >= 0; argparse reports the ValueError."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Return ``text`` as an integer >= 1; argparse reports the ValueError."""
    return _at_least(1, text)


def _available_cores() -> int:
    """Return how many cores this process may use; torch warns where there are more workers than cores."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _at_least(minimum: int, text: str) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)
