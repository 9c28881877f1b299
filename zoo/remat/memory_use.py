"""Bytes that a training step takes, counted in two independent ways.

`measure_memory` reads what the memory allocator reports during a real step. That includes tensors hidden in a compiled
graph, a C++ operator or the closure of a recomputation, and the scratch memory of convolutions.
`count_memory` adds up the tensors that the step's operations return. On the meta device nothing is computed and no
memory is taken, but tensors inside compiled graphs and the scratch memory of operators are not seen. Attention is
counted there as this machine's GPU computes it, or without a GPU as the CPU does.

Tested by tests/remat/test_memory.py.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from zoo.errors import ConfigError
from zoo.remat.meta_attention import meta_attention
from zoo.remat.rules import call_in_mode
from zoo.torch_internals.data import (
    cuda_history,
    record_cuda_history,
    start_allocation_log,
    stop_allocation_log,
    storage_id,
    tensors_of,
)
from zoo.torch_internals.dispatch import TorchDispatchMode, is_profiling

END_OF_FORWARD = "end of forward"
MARK = "zoo mark: "
GRADIENT = "zoo: gradient of bytes "


class Memory(NamedTuple):
    """Bytes of a training step, excluding what existed before it (parameters, buffers, images).

    Args:
    - `held`: bytes alive between the forward and the backward pass.
    - `peak`: the most bytes alive at one time in either pass, including gradients of the parameters.
    - `peak_without_gradients`: the most bytes alive at one time, excluding these gradients.
    - `gradients`: bytes of the parameters' gradients alone.
    """

    held: int
    peak: int
    peak_without_gradients: int
    gradients: int


class Change(NamedTuple):
    """A block of ``size`` bytes is allocated at ``address``, or with a size of 0 or less the block there is freed."""

    address: int
    size: int


def measure_memory(forward: Callable[[], Tensor], parameters: Iterable[Tensor], *, warmup: int = 1) -> Memory:
    """Run a training step and return the bytes that it takes from the allocator of the parameters' device.

    The parameters' gradients are None afterwards. Other state that a training step changes (running statistics, the
    random number generator) changes here too. Raises ConfigError on the CPU if a profiler is active.

    Args:
    - `forward`: computes the loss, a scalar, of images that exist already.
    - `parameters`: parameters of the network, at least one.
    - `warmup`: number of steps that run before the measured one, to compile and to fill caches.
    """
    parameters = list(parameters)
    for _ in range(warmup):
        forward().backward()
    return _memory_of_step(AllocatorLog(parameters[0].device), forward, parameters)


def count_memory(forward: Callable[[], Tensor], parameters: Iterable[Tensor], *, warmup: int = 0) -> Memory:
    """Run a training step and return the bytes of the storages that its operations create.

    With parameters and images on the meta device this takes neither memory nor time.

    Args:
    - `forward`: computes the loss, a scalar, of images that exist already.
    - `parameters`: parameters of the network; their gradients are None afterwards.
    - `warmup`: number of steps that run before the counted one: 1 for lean training within a fraction.
    """
    parameters = list(parameters)

    def forward_with_attention() -> Tensor:
        with meta_attention():
            return forward()

    for _ in range(warmup):
        forward_with_attention().backward()
    return _memory_of_step(StorageLog(), forward_with_attention, parameters)


def _memory_of_step(
    log: AllocatorLog | StorageLog, forward: Callable[[], Tensor], parameters: Sequence[Tensor]
) -> Memory:
    clear_gradients(parameters)
    gc.collect()  # nothing older may be freed during the step
    with log:
        loss = forward()
        log.mark(END_OF_FORWARD)
        with watched(parameters):
            loss.backward()
    addresses = log.addresses(each.grad.untyped_storage() for each in parameters if each.grad is not None)
    memory = summarize(log.changes, log.marks[0][1], addresses)
    clear_gradients(parameters)
    return memory


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradients of the parameters to None."""
    for parameter in parameters:
        parameter.grad = None


class StorageLog(TorchDispatchMode):
    """While active, logs in ``changes`` when an operation creates a storage and when such a storage is freed.

    A storage first seen as an input existed before the log began and is not counted.
    """

    supports_higher_order_operators = True  # such as `torch.cond`, of which it sees inputs and outputs

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self.marks: list[tuple[str, int]] = []  # with how many changes were before
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in tensors_of((args, kwargs)):
            self._know(each.untyped_storage())
        result = call_in_mode(func, *args, **kwargs or {})
        for each in tensors_of(result):
            storage = each.untyped_storage()
            if storage_id(storage) not in self._known:
                self._know(storage)
                self.changes.append(Change(storage_id(storage), storage.nbytes()))
        return result

    def mark(self, name: str) -> None:
        """Mark the present moment."""
        self.marks.append((name, len(self.changes)))

    def totals(self) -> list[int]:
        """Return the bytes that are alive before the first change and after each."""
        return list(totals_of(self.changes))

    def addresses(self, gradients: Iterable[torch.UntypedStorage]) -> set[int]:
        """Return the addresses in the log of gradients."""
        return {storage_id(each) for each in gradients}

    def _know(self, storage: torch.UntypedStorage) -> None:
        address = storage_id(storage)  # unique while the storage lives
        if address not in self._known:
            self._known[address] = weakref.ref(storage, lambda _: self._forget(address))

    def _forget(self, address: int) -> None:
        del self._known[address]
        self.changes.append(Change(address, 0))


def summarize(changes: Sequence[Change], end_of_forward: int, gradients: set[int]) -> Memory:
    """Return the bytes of a step.

    Args:
    - `changes`: all changes of the step, in order.
    - `end_of_forward`: how many of them belong to the forward pass.
    - `gradients`: addresses of the parameters' gradients at the end of the step.
    """
    last_allocation = {change.address: index for index, change in enumerate(changes) if change.size > 0}
    of_gradients = {last_allocation[address] for address in gradients if address in last_allocation}
    totals = list(totals_of(changes))
    return Memory(
        held=totals[end_of_forward],
        peak=max(totals),
        peak_without_gradients=max(totals_of(changes, of_gradients)),
        gradients=sum(changes[index].size for index in of_gradients),
    )


def totals_of(changes: Sequence[Change], left_out: Collection[int] = ()) -> Iterator[int]:
    """Yield the bytes that are alive before the first change and after each, without changes at ``left_out`` indices.

    A block that is freed without having been allocated here existed before and does not count.
    """
    live: dict[int, int] = {}
    total = 0
    yield total
    for index, (address, size) in enumerate(changes):
        if size > 0 and index not in left_out:
            live[address] = size
            total += size
        elif size <= 0:
            total -= live.pop(address, 0)
        yield total


other_logs: list[Callable[[], object]] = []  #: functions that end the logs of others, which would be in the way


class AllocatorLog:
    """While active, logs in ``changes`` what the memory allocator of a device allocates and frees, in order.

    On CUDA these are the requested bytes of the caching allocator's history, which is cleared. On the CPU a profiler
    reports sizes without addresses: a freed block is assumed to be the latest block of its size.

    Raises ConfigError on the CPU if a profiler is active already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._gradients: set[int] = set()
        self.changes: list[Change] = []
        self.marks: list[tuple[str, int]] = []  # with how many changes were before

    def __enter__(self) -> AllocatorLog:
        for end in other_logs:
            end()
        if self._is_cuda:
            record_cuda_history("all")
        elif is_profiling():
            raise ConfigError(
                "allocations cannot be measured while a profiler is active",
                "zoo.measure_memory",
                "measure outside of torch.profiler, or use zoo.count_memory",
            )
        else:
            start_allocation_log()
        return self

    def mark(self, name: str) -> None:
        """Mark the present moment."""
        if self._is_cuda:
            self.marks.append((name, len(self._history())))
        else:
            _mark(f"{MARK}{name}")

    def totals(self) -> list[int]:
        """Return the bytes that are alive before the first change and after each."""
        return list(totals_of(self.changes))

    def __exit__(self, *error: Any) -> None:
        if self._is_cuda:
            self.changes = self._history()
            record_cuda_history(None)
        else:
            self._read(stop_allocation_log())

    def addresses(self, gradients: Iterable[torch.UntypedStorage]) -> set[int]:
        """Return the addresses in the log of gradients, whose backward ran within `watched`."""
        return {each.data_ptr() for each in gradients} if self._is_cuda else self._gradients

    def _history(self) -> list[Change]:
        sizes = ((entry["action"], entry["addr"], entry["size"]) for entry in cuda_history(self._device))
        return [
            Change(address, size if action == "alloc" else 0)
            for action, address, size in sizes
            if action in ("alloc", "free_requested")
        ]

    def _read(self, events: Iterable[tuple[str, int]]) -> None:
        live: defaultdict[int, list[int]] = defaultdict(list)  # size -> invented addresses
        for name, size in events:
            if name.startswith(MARK):
                self.marks.append((name.removeprefix(MARK), len(self.changes)))
            elif name.startswith(GRADIENT):
                blocks = live[int(name.removeprefix(GRADIENT))]
                if blocks:
                    self._gradients.add(blocks.pop())
            elif size > 0:
                live[size].append(len(self.changes))
                self.changes.append(Change(len(self.changes), size))
            elif size < 0 and live[-size]:  # otherwise it existed before
                self.changes.append(Change(live[-size].pop(), 0))


@contextmanager
def watched(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Return a context in which an active `AllocatorLog` learns when backward computes a gradient."""
    with ExitStack() as hooks:
        for each in parameters:
            if each.requires_grad:
                hooks.callback(each.register_hook(_mark_gradient).remove)
        yield


def _mark_gradient(gradient: Tensor | None) -> None:
    # A compiled graph passes None for a parameter without a gradient.
    if gradient is not None and gradient.layout is torch.strided:
        _mark(f"{GRADIENT}{gradient.untyped_storage().nbytes()}")


def _mark(name: str) -> None:
    with record_function(name):
        pass
