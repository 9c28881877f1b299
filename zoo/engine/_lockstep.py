"""Runs the replicas of one process in turns. They exchange tensors as processes do by collective operations."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.data.sampler import replicas_of
from zoo.engine._process import Process
from zoo.errors import ConfigError
from zoo.ops.abn.replica_group import ReplicaGroup
from zoo.ops.recomputation import RandomState
from zoo.torch_internals.data import ALL_GATHER


class Lockstep(ReplicaGroup):
    """Runs one function per replica of this process, each in its own thread, one at a time.

    A function runs until it calls `gather`; then the next one runs. Each function has its own states of the random
    generators of torch and Python. Functions return what they would return in separate processes: only `gather`
    connects them.

    Backward passes run in the threads that start them. The threads of autograd for CUDA devices would deadlock: there
    is one per device, and it would wait in the `gather` of one replica for the others.

    Args:
    - `count`: number of replicas over all processes.
    - `process`: this process.
    """

    def __init__(self, count: int, process: Process) -> None:
        self._count, self._process = count, process
        self._own = replicas_of(process.rank, process.world_size, count)
        self._place = threading.local()
        self._turns: list[SimpleQueue[None]] = []  # one queue per function; an item lets it run
        self._waiting: dict[int, Tensor] = {}  # tensors passed to `gather`, by index
        self._gathered: Tensor | None = None
        self._active: list[int] = []  # indices of the functions that have not returned, in the order of their turns
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], object]]) -> None:
        """Call the functions of this process's replicas, the last one first, and return when all have returned.

        An exception of one of them ends all, and is raised here. Raises ConfigError if one returns while others wait
        for it in `gather`.
        """
        self._active = [*reversed(range(len(functions)))]
        self._turns = [SimpleQueue() for _ in functions]
        threads = [
            threading.Thread(target=self._run, args=(index, function), name=f"replica {self._own[index]}", daemon=True)
            for index, function in enumerate(functions)
        ]
        try:
            for thread in threads:
                thread.start()
            self._turns[self._active[0]].put(None)
            for thread in threads:
                thread.join()
        except BaseException as error:  # raised by a signal handler
            self._end(error)
            raise
        self._waiting, self._gathered = {}, None
        cause, self._error = self._error, None
        if cause is not None:
            raise cause

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors x of all replicas, (replicas, *x.shape), once each function has called this."""
        index: int = self._place.index
        self._waiting[index] = x
        if len(self._waiting) == len(self._own):
            mine = [self._waiting[number] for number in range(len(self._own))]
            self._waiting = {}
            self._gathered = self._gather_processes(mine)
        elif len(self._waiting) == len(self._active):
            raise self._uneven()
        states = RandomState.now(x), random.getstate()
        self._pass_turn(index)
        self._wait(index)
        states[0].restore()
        random.setstate(states[1])
        assert self._gathered is not None
        return self._gathered

    def _gather_processes(self, mine: list[Tensor]) -> Tensor:
        """Gather the tensors ``mine`` of all processes, and return them in the order of the replicas."""
        if len({(tensor.shape, tensor.dtype) for tensor in mine}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in mine)
            raise ConfigError(f"replicas synchronize different norms (statistics of shapes {shapes})", self._where())
        own, world_size = torch.stack(mine), self._process.world_size
        if world_size == 1:
            return own
        most = len(replicas_of(0, world_size, self._count))
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        gathered = own.new_empty(world_size * most, *own.shape[1:])
        getattr(dist, ALL_GATHER)(gathered, padded)
        # Process p has the replicas p, p + world_size, ...
        by_replica = gathered.view(world_size, most, *own.shape[1:]).transpose(0, 1)
        return by_replica.reshape(-1, *own.shape[1:])[: self._count].clone()

    def _run(self, index: int, function: Callable[[], object]) -> None:
        self._place.index = index
        device = self._process.device
        try:
            self._wait(index)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.autograd.set_multithreading_enabled(False):
                function()
        except BaseException as error:
            self._end(error)
            return
        if self._waiting:
            self._end(self._uneven())
        else:
            self._pass_turn(index, returned=True)

    def _pass_turn(self, index: int, returned: bool = False) -> None:
        """Let the next function run."""
        place = self._active.index(index)
        if returned:
            del self._active[place]
        else:
            place += 1
        if self._active:
            self._turns[self._active[place % len(self._active)]].put(None)

    def _wait(self, index: int) -> None:
        self._turns[index].get()
        if self._error is not None:
            raise _Ended

    def _end(self, error: BaseException) -> None:
        """End all functions. ``error`` becomes the cause, unless there is one already."""
        if self._error is None:
            self._error = error
        for turn in self._turns:
            turn.put(None)

    def _uneven(self) -> ConfigError:
        number = self._own[next(iter(self._waiting))]
        what = f"replica {number} runs more synchronized norms than another replica in a step"
        return ConfigError(what, self._where(), "let all replicas call the same norms")

    def _where(self) -> str:
        return f"optimizer.replicas = {self._count}"


class _Ended(BaseException):
    """Ends the function of a replica, because another replica raised an exception."""
