"""Options that several commands share."""

from __future__ import annotations

import argparse
import os


def add_loader_options(parser: argparse.ArgumentParser, workers: int) -> None:
    """Add the options about reading images and printing progress; ``workers`` is the most that a default starts."""
    parser.add_argument(
        "-j", "--workers", type=whole_number, default=min(workers, _available_cores()), metavar="N",
        help="processes that read images, per process of the run (default: the number of cores, at most "
        f"{workers}; here %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "-p", "--print-freq", type=positive, default=10, metavar="N",
        help="batches between two lines of the log (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--on-bad-image", choices=("stop", "skip"), default="stop",
        help="at an unreadable image: end with its name, or leave it out, count and report it "
        "(default: %(default)s)",
    )  # fmt: skip


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the launcher or its user passes to each process."""
    parser.add_argument(
        "--local_rank", "--local-rank", type=whole_number, default=None, metavar="N",
        help="index of this process on its machine, passed by torch.distributed.launch "
        "(torchrun sets LOCAL_RANK instead)",
    )  # fmt: skip
    parser.add_argument(
        "--dist-backend", choices=("nccl", "gloo"), default=None,
        help="how processes talk (default: nccl with CUDA, gloo without)",
    )  # fmt: skip


def whole_number(text: str) -> int:
    """Return ``text`` as an integer >= 0; argparse reports the ValueError."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Return ``text`` as an integer >= 1; argparse reports the ValueError."""
    return _at_least(1, text)


def _available_cores() -> int:
    """Return how many cores this process may use; of more workers torch warns."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _at_least(minimum: int, text: str) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)
