"""Bytes of a training step, counted from the tensors that its operations return; on the meta device nothing is run.

Independent of the allocator.  Seen is what passes through torch's dispatcher: tensors inside compiled graphs and the
scratch memory of an operator are not, so that real steps are measured by `zoo.benchmark.held`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo.benchmark.held import Change, Memory, clear_gradients, gradient_storages, summarise


def count_memory(forward: Callable[[], Tensor], parameters: Iterable[Tensor], log: StorageLog | None = None) -> Memory:
    """Run a training step and return the bytes of the storages that its operations make, see `measure_memory`.

    With parameters and images on the meta device no memory is taken.  ``log`` is a new one, by default of the
    storages alone.
    """
    parameters = list(parameters)
    clear_gradients(parameters)
    gc.collect()
    with log or StorageLog() as log:
        loss = forward()
        end_of_forward = len(log.changes)
        loss.backward()
    storages = gradient_storages(parameters, lambda storage: storage._cdata)
    changes = list(log.changes)
    clear_gradients(parameters)
    return summarise(changes, end_of_forward, storages)


class StorageLog(TorchDispatchMode):
    """Logs, while it is active, when operations make a storage and when that storage is freed, in ``changes``.

    A storage that an operation receives before any has returned it existed before, and is not logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in storages_of((args, kwargs)):
            self._know(storage)
        result = func(*args, **kwargs or {})
        for storage in storages_of(result):
            if storage._cdata not in self._known:
                self._know(storage)
                self.changes.append(Change(storage._cdata, storage.nbytes()))
        return result

    def _know(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata  # unique while the storage lives
        if address not in self._known:
            self._known[address] = weakref.ref(storage, lambda _: self._forget(address))

    def _forget(self, address: int) -> None:
        del self._known[address]
        self.changes.append(Change(address, 0))


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors in a tree of arguments or results; shared ones are repeated."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
