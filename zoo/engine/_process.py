"""The distributed process of a run: its rank, its device and its messages to the other ranks."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.data.loader import LoaderOptions, shortage
from zoo.engine._rendezvous import open_store
from zoo.errors import ConfigError, ZooError, truncate

CPU = torch.device("cpu")
# Timeout of a collective operation. A process that dies is noticed at once, so the timeout only matters for machines
# that freeze or lose their network. It must exceed the time that a rank may legitimately lag behind the others: for
# example, `zoo segment` divides the images before it knows how long each of them takes.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# torch raises these errors from a signal handler, so they can surface at any line of the main process.
DEAD_WORKER = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by|exited unexpectedly)|Pin memory thread exited")
EXITED = "exited unexpectedly"
BUS_ERROR = "Bus error"  # raised by a write to full shared memory

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Process:
    """One process of a run; the default is a single-process run on the CPU.

    Args:
    - `rank`: rank among all processes of the run.
    - `world_size`: number of processes of the run.
    - `device`: device that the process computes on.
    - `control`: Gloo group of all ranks for messages between hosts that never wait for a GPU; None for one process.
    - `store`: key-value store of all ranks, for messages that no rank has to wait for; None for one process.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    control: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files of the run."""
        return self.rank == 0

    def loader_options(self, workers: int, replicas: int | None = None) -> LoaderOptions:
        """Return the options to read this process's images, a share of ``replicas`` or of all processes."""
        return LoaderOptions(self.rank, self.world_size, workers, self.device.type == "cuda", replicas)

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank (an all-reduce)."""
        if self.control is None:
            return flag
        number = torch.tensor(int(flag))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.control)
        return bool(number)

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks, in rank order, on rank 0 and an empty list on the others."""
        if self.control is None:
            return [item]
        items: list[Any] = [None] * self.world_size if self.is_main else []
        dist.gather_object(item, items if self.is_main else None, dst=0, group=self.control)
        return items

    def broadcast(self, item: Any) -> Any:
        """Return rank 0's ``item`` on every rank. Ignores the items of other ranks."""
        if self.control is None:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def on_main(self, action: Callable[[], ResultT]) -> ResultT:
        """Call ``action`` on rank 0 and return its result on every rank; if it raises a ZooError, every rank does."""
        if self.control is None:
            return action()
        answer: Any = None
        if self.is_main:
            try:
                answer = action()
            except ZooError as error:
                answer = error
        answer = self.broadcast(answer)
        if isinstance(answer, ZooError):
            raise answer
        result: ResultT = answer
        return result


def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Overwrite ``tensors`` with those of rank 0, in one message. Every rank has to call it with the same shapes."""
    if not tensors:
        return
    parts = [tensor.detach().flatten().view(torch.uint8) for tensor in tensors]
    message = torch.cat(parts)
    dist.broadcast(message, src=0)
    for tensor, received in zip(tensors, message.split([len(part) for part in parts]), strict=True):
        # The address of the copy is aligned for a view with a wider dtype.
        tensor.detach().copy_(received.clone().view(tensor.dtype).view_as(tensor))


@contextmanager
def open_process(backend: str | None = None) -> Iterator[Process]:
    """Joins the process group that torchrun's environment describes, and leaves it at the end.

    Without torchrun the process runs alone and has no group. Each process gets the CUDA device of its local rank, or
    the CPU. Raises ConfigError if the environment is incomplete or inconsistent, if other processes do not arrive
    (`zoo.engine._rendezvous.open_store`), if there are fewer devices than local ranks, or if the backend does not
    support the device. Raises a one-line ZooError if a worker of a data loader dies. When another rank dies, collective
    operations raise torch's own errors; torchrun ends and restarts the processes.

    Args:
    - `backend`: backend of the group, "nccl" or "gloo"; None for NCCL on CUDA devices and Gloo on the CPU.
    """
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        what = "only one of RANK and WORLD_SIZE is set"
        raise ConfigError(what, "environment", "start with torchrun, or unset it for a single process")
    world_size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if rank >= world_size:  # torch would wait for the other processes
        what = f"RANK={rank} is not below WORLD_SIZE={world_size}"
        raise ConfigError(what, "environment", "start with torchrun, or count ranks from 0")
    device = _open_device(_number("LOCAL_RANK", 0))
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            "--dist-backend nccl needs CUDA, which this machine lacks", remedy="leave it out, or give gloo"
        )
    with shorten_worker_errors():
        if world_size == 1:
            yield Process(device=device)
            return
        store = open_store(rank, world_size)
        store.set_timeout(COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        try:
            control: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            yield Process(rank, world_size, device, control, store)
            # A rank that finishes first must not close the connections of a rank that still works. After an error there
            # is no barrier, because the other ranks would not reach it.
            dist.barrier(control)
        finally:
            dist.destroy_process_group()


def processor(device: torch.device) -> str:
    """Return the model of a GPU, or the instruction set that torch uses on the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


@contextmanager
def shorten_worker_errors() -> Iterator[None]:
    """Converts torch's RuntimeError about a dead data loader worker to a one-line ZooError."""
    try:
        yield
    except RuntimeError as error:
        if not DEAD_WORKER.search(str(error)):
            raise
        reason = truncate(str(error).split(". ")[0].strip())
        raise ZooError(f"a data loader worker died ({reason}); {_remedy(reason)}") from error


def _remedy(reason: str) -> str:
    """Return the remedy for a worker that died for ``reason``."""
    method = multiprocessing.get_start_method()
    if EXITED in reason and method != "fork":
        return (
            f"workers of the start method {method} import the script that starts them: call zoo.train or zoo.score "
            'below if __name__ == "__main__":, or see the output of the worker above'
        )
    if BUS_ERROR in reason:
        return f"{shortage(reason)}; continue with --resume auto"
    return "--workers: if memory ran out, use fewer workers; continue with --resume auto"


def _number(name: str, default: int) -> int:
    """Return the number in a variable of the environment, or the default if it is not set."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"{name}={truncate(repr(value))} is not a whole number", "environment", "start with torchrun")
    return int(value)


def _open_device(local_rank: int) -> torch.device:
    """Make this process's CUDA device current and return it; return the CPU without CUDA."""
    if not torch.cuda.is_available():
        return CPU
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank}, but this machine has {torch.cuda.device_count()} CUDA device(s); "
            "--nproc_per_node (and CUDA_VISIBLE_DEVICES): start at most one process per device"
        )
    torch.cuda.set_device(local_rank)
    torch.backends.cudnn.benchmark = True  # all training batches have one shape
    return torch.device("cuda", local_rank)


def seed_everything(*words: int) -> None:
    """Seed torch (CPU and all CUDA devices) and Python's `random` with a function of ``words``.

    A run seeds with (seed, rank), and with rank -1 for the initial weights, which all ranks share. A replica seeds with
    (seed, step, replica).
    """
    mixed = random.Random(" ".join(map(str, ("zoo", *words)))).getrandbits(63)
    random.seed(mixed)
    torch.manual_seed(mixed)
