"""Runs a function in several processes of a Gloo group, for distributed tests.

The processes come from a fork server that has imported torch and zoo once, so that starting a group costs a fraction
of a second. A function handed to run_distributed has to be at the top level of an importable module.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_mp

TIMEOUT_S = 60.0
PRELOADED = ["torch", "torch.distributed", "zoo.engine._trainer"]


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, group: bool = True) -> list[Any]:
    """Return [fn(*args) of rank 0, fn(*args) of rank 1, ...], each from a process of one Gloo group.

    Every process has one thread and the environment of a launcher. Without ``group`` the group is left to ``fn``.
    An exception in any process ends all of them and is raised here with the rank and the traceback.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = (world_size, free_port(), folder, group, fn, args)
        try:
            torch_mp.start_processes(_run_rank, args=ranks, nprocs=world_size, start_method="forkserver")
        except (torch_mp.ProcessRaisedException, torch_mp.ProcessExitedException) as error:
            raise RuntimeError(_tracebacks(folder) or str(error)) from None
        results = [Path(folder, f"{rank}.pt") for rank in range(world_size)]
        return [torch.load(path, weights_only=False) for path in results]


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


class LogLines(logging.Handler):
    """The texts of all log records of the package at level INFO."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zoo").addHandler(self)
        logging.getLogger("zoo").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def prepare_process(rank: int, world_size: int, port: int) -> None:
    """Make this process one of a launcher's: environment, one thread, and loaders that fork their workers."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    # Children of a fork server would start their own fork servers, which import torch for seconds.
    multiprocessing.set_start_method("fork", force=True)


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    group: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    prepare_process(rank, world_size, port)
    try:
        if group:
            with _gloo_group(rank, world_size, folder):
                torch.save(fn(*args), Path(folder, f"{rank}.pt"))
        else:
            torch.save(fn(*args), Path(folder, f"{rank}.pt"))
    except BaseException:
        # The end of this process makes the other ranks fail too: the first file is the cause.
        Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


@contextmanager
def _gloo_group(rank: int, world_size: int, folder: str) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    yield
    # The first rank to end must not close the connections of a rank that is still in its last collective. After an
    # error the process just ends.
    dist.barrier()
    dist.destroy_process_group()


def _tracebacks(folder: str) -> str:
    files = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(path.read_text() for path in files)
