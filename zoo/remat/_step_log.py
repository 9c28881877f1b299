"""Logs of the memory that a training step allocates and frees."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from zoo.errors import ConfigError
from zoo.remat._operations import call_in_mode
from zoo.torch_internals.data import (
    AllocatorReading,
    cuda_history,
    is_cuda_history_recorded,
    read_allocator,
    record_cuda_history,
    start_allocation_log,
    stop_allocation_log,
    storage_id,
    tensors_of,
)
from zoo.torch_internals.dispatch import TorchDispatchMode, dispatch_modes, is_profiling

MARK = "zoo mark: "
GRADIENT = "zoo: gradient of bytes "


class Change(NamedTuple):
    """An allocation of ``size`` bytes at ``address``. With a size of 0 or less, the block there is freed."""

    address: int
    size: int


class StorageLog(TorchDispatchMode):
    """While active, logs in ``changes`` when an operation creates a storage and when such a storage is freed.

    A storage first seen as an input existed before the log began and is not counted.
    """

    supports_higher_order_operators = True  # for operators such as `torch.cond`, it logs inputs and outputs

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self.marks: list[tuple[str, int]] = []  # names, and numbers of changes before them
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages_of((args, kwargs)):
            self._know(storage)
        result = call_in_mode(func, *args, **kwargs or {})
        for storage in _storages_of(result):
            self.note_created(storage)
        return result

    def note_created(self, storage: torch.UntypedStorage) -> None:
        """Log that a storage was created, unless it is known."""
        if storage_id(storage) not in self._known:
            self._know(storage)
            self.changes.append(Change(storage_id(storage), storage.nbytes()))

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


def _storages_of(tree: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tensors_of(tree) if each.layout is torch.strided]  # others have none


def note_created(tensor: Tensor) -> Tensor:
    """Report a tensor created while dispatch modes were disabled to the active logs; return the tensor."""
    for mode in dispatch_modes():
        if isinstance(mode, StorageLog):
            mode.note_created(tensor.untyped_storage())
    return tensor


def totals_of(changes: Sequence[Change], left_out: Collection[int] = ()) -> Iterator[int]:
    """Yield the bytes that are alive before the first change and after each.

    Blocks that were allocated before the changes, and allocations at the indices ``left_out``, do not count.
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


other_logs: list[Callable[[], object]] = []  #: functions that end other open logs, since only one can be active


class AllocatorLog:
    """While active, logs in ``changes`` the blocks that the allocator of a device allocates and frees, in order.

    On CUDA, reads the requested bytes from the history of the caching allocator, and clears the history. On the CPU, a
    profiler reports sizes without addresses: a freed block is assumed to be the latest block of its size.

    Raises ConfigError on the CPU if a profiler is active already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._gradients: set[int] = set()
        self.changes: list[Change] = []
        self.marks: list[tuple[str, int]] = []  # names, and numbers of changes before them

    def __enter__(self) -> AllocatorLog:
        for end in other_logs:
            end()
        if self._is_cuda:
            record_cuda_history("all")
        elif is_profiling():
            raise ConfigError(
                "allocations cannot be measured while a profiler is active",
                "zoo.memory.allocations.measure_memory",
                "measure outside of torch.profiler, or use count_memory of the same module",
            )
        else:
            start_allocation_log()
        return self

    def mark(self, name: str) -> None:
        """Mark the present moment."""
        if self._is_cuda:
            self.marks.append((name, len(_cuda_changes(self._device))))
        else:
            _mark(f"{MARK}{name}")

    def totals(self) -> list[int]:
        """Return the bytes that are alive before the first change and after each."""
        return list(totals_of(self.changes))

    def __exit__(self, *error: Any) -> None:
        if self._is_cuda:
            self.changes = _cuda_changes(self._device)
            record_cuda_history(None)
        else:
            self._read(stop_allocation_log())

    def addresses(self, gradients: Iterable[torch.UntypedStorage]) -> set[int]:
        """Return the addresses in the log of gradients, if backward ran within `log_gradients`."""
        return {each.data_ptr() for each in gradients} if self._is_cuda else self._gradients

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


class CudaLog:
    """Reads the allocated bytes of a GPU at each mark, and between marks from the history of the allocator.

    Does not wait for the GPU. A history that other code records continues.
    """

    def __init__(self, device: torch.device) -> None:
        self.marks: list[tuple[str, int]] = []  # with the index of the bytes at the mark
        self._device = device
        self._names: list[str] = []
        self._readings: list[AllocatorReading] = []  # at the start and at each mark
        self._totals: list[int] = []

    def __enter__(self) -> CudaLog:
        self._is_shared = is_cuda_history_recorded()
        if not self._is_shared:
            record_cuda_history("all")
        self._readings.append(read_allocator(self._device))
        return self

    def __exit__(self, *error: object) -> None:
        sizes = [change.size for change in _cuda_changes(self._device)]
        if not self._is_shared:
            record_cuda_history(None)
        end = read_allocator(self._device)
        first = self._readings[0].num_bytes
        names = iter(self._names)
        for reading, following in pairwise([*self._readings, end]):
            if self._totals:
                self.marks.append((next(names), len(self._totals)))
            self._totals.append(reading.num_bytes - first)
            begin, until = (len(sizes) - end.num_changes + each.num_changes for each in (reading, following))
            self._totals += accumulate(sizes[max(0, begin) : max(0, until)], initial=self._totals[-1])

    def mark(self, name: str) -> None:
        """Read the allocated bytes."""
        self._names.append(name)
        self._readings.append(read_allocator(self._device))

    def totals(self) -> list[int]:
        """Return the bytes at the marks and after each change in between, beyond those at the start."""
        return self._totals


def _cuda_changes(device: torch.device) -> list[Change]:
    """Return the blocks in the history of CUDA's allocator; a freed block has the negative of its size."""
    signs = {"alloc": 1, "free_requested": -1}
    history = (entry for entry in cuda_history(device) if entry["action"] in signs)
    return [Change(entry["addr"], signs[entry["action"]] * entry["size"]) for entry in history]


StepLog = AllocatorLog | StorageLog | CudaLog


def log_of(device: torch.device) -> StepLog:
    """Return a log of the bytes of a step on a device."""
    if device.type == "cuda":
        return CudaLog(device)
    return StorageLog() if device.type == "meta" else AllocatorLog(device)


@contextmanager
def log_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Marks the gradients that backward computes in an active `AllocatorLog`."""
    with ExitStack() as hooks:
        for parameter in parameters:
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(_mark_gradient).remove)
        yield


def _mark_gradient(gradient: Tensor | None) -> None:
    # A compiled graph passes None for a parameter without a gradient.
    if gradient is not None and gradient.layout is torch.strided:
        _mark(f"{GRADIENT}{gradient.untyped_storage().nbytes()}")


def _mark(name: str) -> None:
    with record_function(name):
        pass
