"""The processes of a run: the number and device of this one, messages between them, and reports of a lost process."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zoo.engine.heartbeat import Heartbeat, lost_message
from zoo.engine.meeting import meet
from zoo.errors import ConfigError, LostProcessError, ZooError, brief

logger = logging.getLogger(__name__)

BACKENDS = ("nccl", "gloo")
CPU = torch.device("cpu")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAST_PORT = 65535
MAX_DIGITS = 9
PATIENCE_S = 15.0  # after this time a process logs that it waits for the others

# torch raises these errors from a signal handler, so that they can come from any line of the main process.
DEAD_WORKER = re.compile(r"DataLoader worker \(pid.*?\) (?:is killed by|exited unexpectedly)|Pin memory thread exited")
# The errors of Gloo, which have no class of their own.
LOST_PEER = re.compile(
    r"gloo.*(?:[Cc]onnection|[Ss]ocket|[Tt]imed out|[Tt]imeout|peer)|[Cc]onnection (?:closed|reset) by peer", re.S
)
SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")  # Gloo writes this before its text

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Process:
    """One of the processes of a run; the default is a process that is alone.

    Args:
    - `rank`: number of the process among all processes of the run.
    - `local_rank`: number of the process among those of its machine.
    - `world_size`: number of processes of the run.
    - `device`: device on which the process computes.
    - `control`: a Gloo group of all processes for messages between hosts, which never wait for a GPU; None when alone.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    control: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes the files of the run."""
        return self.rank == 0

    def any_rank(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
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
        """Return rank 0's ``item`` on every rank; the items of the other ranks are ignored."""
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


@contextmanager
def open_process(local_rank_arg: int | None = None, backend: str | None = None) -> Iterator[Process]:
    """Join the run that the launcher's environment describes, or run alone without one; leave it at the end.

    Each process gets the CUDA device of its local rank, or the CPU. Raises ConfigError if the environment is half set
    or contradicts the argument, if there are fewer devices than local ranks, or if the backend cannot work here;
    LostProcessError if another process of the run has ended or cannot be reached; and ZooError, in one line, if one
    that reads images has ended. Where torch waits in vain for a lost process, `zoo.engine.heartbeat` ends this one.

    Args:
    - `local_rank_arg`: the value of ``--local-rank``, None without it; the variable LOCAL_RANK may be set instead.
    - `backend`: "nccl", "gloo", or None for NCCL with CUDA and Gloo without.
    """
    world_size = _world_size()
    local_rank = _local_rank(local_rank_arg, world_size)
    device = _open_device(local_rank)
    with one_line_breakdowns():
        if world_size == 1:
            yield Process(0, local_rank, 1, device)
        else:
            yield from _joined(world_size, local_rank, device, backend)


def _joined(world_size: int, local_rank: int, device: torch.device, backend: str | None) -> Iterator[Process]:
    """Yield this process as one of a group, which is left at the end; LostProcessError if another one is lost."""
    store, rank = _join(world_size, _backend(backend, device))
    heartbeat = Heartbeat(store, rank, world_size)
    try:
        heartbeat.start()  # before the first message, so that nobody is blamed who lives when that fails
        control: Any = dist.new_group(backend="gloo")  # a group, as this process is in it
        yield Process(rank, local_rank, world_size, device, control)
        # A process that leaves first must not close the connections of one that still works, nor the store that it
        # reads. This waits after success only: after an error on this rank alone the others would not come.
        dist.barrier(control)
        heartbeat.close()
        dist.barrier(control)
    except BaseException as error:
        if is_lost_peer(error):
            found = heartbeat.find_lost() or f"another process of the run has ended ({_short(error)})"
            raise LostProcessError(lost_message(found)) from error
        reason = _dead_worker_message(error) if is_dead_worker(error) else str(error)
        heartbeat.say_end(reason or type(error).__name__)
        raise
    finally:
        heartbeat.close()
        dist.destroy_process_group()


def _join(world_size: int, backend: str) -> tuple[dist.Store, int]:
    """Make the default group of the run's processes; return their store and the number of this process."""
    try:
        with _said_after_a_while(f"waiting for the other {world_size - 1} process(es) of the run"):
            agents_store, rank, _ = next(dist.rendezvous("env://"))
            store = meet(agents_store, rank, world_size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise LostProcessError(
            lost_message(f"the {world_size} processes of the run have not found each other ({_short(error)})")
        ) from error
    return store, rank


@contextmanager
def one_line_breakdowns() -> Iterator[None]:
    """Raise ZooError in place of the RuntimeError with which torch reports a dead worker."""
    try:
        yield
    except RuntimeError as error:
        if not is_dead_worker(error):
            raise
        raise ZooError(_dead_worker_message(error)) from error


def is_dead_worker(error: BaseException) -> bool:
    """Return whether ``error`` is torch's report that a process which reads images was killed or ended by itself."""
    return isinstance(error, RuntimeError) and DEAD_WORKER.search(str(error)) is not None


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` is torch's report that another process of the run has ended or cannot be reached."""
    if not isinstance(error, RuntimeError) or is_dead_worker(error):
        return False
    if isinstance(error, dist.DistBackendError) and "invalid usage" in str(error):
        return False  # NCCL's word for a mistake of this process, such as a GPU that two processes share
    return isinstance(error, dist.DistError) or LOST_PEER.search(str(error)) is not None


def _dead_worker_message(error: BaseException) -> str:
    return (
        f"a process that reads images has ended ({_short(error)}); --workers: was the memory full? give fewer "
        "workers, then continue with --resume auto"
    )


def _short(error: BaseException) -> str:
    """Return the first sentence of torch's text, without the place in torch's sources before it."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return brief(SOURCE_PLACE.sub("", line).split(". ")[0].strip())


@contextmanager
def _said_after_a_while(line: str) -> Iterator[None]:
    """Log ``line`` if what is done here takes longer than `PATIENCE_S`."""
    timer = threading.Timer(PATIENCE_S, logger.warning, ["%s", line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _world_size() -> int:
    """Return WORLD_SIZE, 1 without it; ConfigError if some variables are set and others that they need are not."""
    set_names = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not set_names:
        return 1
    values = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES if name != "LOCAL_RANK"}
    alone = values["WORLD_SIZE"] == "1"
    missing = [name for name, value in values.items() if value is None and not (alone and "MASTER" in name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(set_names)} set, but not {', '.join(missing)}; environment of the distributed run: "
            f"start with torchrun or torch.distributed.launch, or unset {' and '.join(set_names)} to run alone"
        )
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not one of WORLD_SIZE={world_size} ranks; environment: ranks count from 0")
    if world_size > 1 and _integer("MASTER_PORT") > LAST_PORT:
        raise ConfigError(f"MASTER_PORT={_integer('MASTER_PORT')} is no port; environment: give one up to {LAST_PORT}")
    return world_size


def _local_rank(argument: int | None, world_size: int) -> int:
    """Return the local rank of the environment or the argument, 0 for a process alone without either."""
    variable = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
    if variable is not None and argument is not None and variable != argument:
        raise ConfigError(
            f"--local-rank {argument} contradicts LOCAL_RANK={variable}; command line and environment: give one of them"
        )
    local_rank = argument if variable is None else variable
    if local_rank is None and world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE={world_size}, but neither LOCAL_RANK nor --local-rank; environment: "
            f"start with torchrun or torch.distributed.launch"
        )
    return local_rank or 0


def _integer(name: str) -> int:
    value = os.environ[name]
    if not (value.isdecimal() and len(value) <= MAX_DIGITS):
        raise ConfigError(f"{name}={value!r} is not a whole number; environment: start with torchrun")
    return int(value)


def _open_device(local_rank: int) -> torch.device:
    """Return this process's CUDA device, made the current one, or the CPU where there is no CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank}, but this machine shows {torch.cuda.device_count()} CUDA device(s); "
            f"--nproc_per_node (and CUDA_VISIBLE_DEVICES): start at most one process per device"
        )
    torch.cuda.set_device(local_rank)
    torch.backends.cudnn.benchmark = True  # all training batches have one shape
    return torch.device("cuda", local_rank)


def _backend(name: str | None, device: torch.device) -> str:
    if name is None:
        return "nccl" if device.type == "cuda" else "gloo"
    if name not in BACKENDS:
        raise ConfigError(f"{name!r} is not one of {', '.join(BACKENDS)}; --dist-backend: give one of them")
    if name == "nccl" and device.type != "cuda":
        raise ConfigError("nccl needs CUDA, which this machine lacks; --dist-backend: leave it out for gloo")
    return name


def seed_everything(seed: int, rank: int) -> None:
    """Seed torch (CPU and all CUDA devices) and Python's `random` with a function of (seed, rank).

    Rank -1 is for random numbers that all ranks share: the initial weights.
    """
    mixed = random.Random(f"zoo {seed} {rank}").getrandbits(63)
    random.seed(mixed)
    torch.manual_seed(mixed)
