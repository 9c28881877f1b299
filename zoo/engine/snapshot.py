"""Copies of a state in host memory, which can be written to a file while the state itself changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage

_Key = tuple[torch.device, int, int]
_Pair = tuple[Tensor, UntypedStorage]  # a buffer, and what is copied to it


class Snapshots:
    """Copies trees of tensors; the memory of one copy is kept, and the next one overwrites it.

    Fresh memory costs more time than the copy itself, as the system has to hand out every page of it. The copies of
    CUDA tensors are in pinned memory, which the device fills directly.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, tree: Any, later: Iterable[Tensor] = ()) -> tuple[Any, Callable[[], None]]:
        """Return a copy of ``tree``, of dicts, lists and tuples, with all tensors on the CPU, and what completes it.

        The copy before is lost. Tensors that share memory in ``tree`` do so in the copy, so that both make the same
        file. Those of ``later`` that are on the CPU are copied when the function that is returned is called, in any
        thread, and must not change before. All others have been copied, and the device has been waited for.
        """
        pairs: dict[_Key, _Pair] = {}
        taken = self._copy(tree, pairs)
        del self._buffers[len(pairs) :]
        postponed = {_key(tensor.untyped_storage()) for tensor in later if tensor.device.type == "cpu"}
        _fill([pair for key, pair in pairs.items() if key not in postponed])
        for device in {key[0] for key in pairs if key[0].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return taken, partial(_fill, [pair for key, pair in pairs.items() if key in postponed])

    def _copy(self, tree: Any, pairs: dict[_Key, _Pair]) -> Any:
        """Return ``tree`` with tensors in the buffers, which are still to be filled as ``pairs`` tells."""
        if isinstance(tree, Tensor):
            storage = self._copy_storage(tree.untyped_storage(), pairs)
            place = tree.storage_offset(), tree.size(), tree.stride()
            return torch.empty(0, dtype=tree.dtype).set_(storage, *place)
        if isinstance(tree, dict):
            taken = copy.copy(tree)  # with the version numbers of modules, which are an attribute of a state dict
            for key, value in tree.items():
                taken[key] = self._copy(value, pairs)
            return taken
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._copy(value, pairs) for value in tree)
        return tree

    def _copy_storage(self, storage: UntypedStorage, pairs: dict[_Key, _Pair]) -> UntypedStorage:
        key = _key(storage)
        if key not in pairs:
            pairs[key] = self._buffer(len(pairs), storage), storage
        return pairs[key][0].untyped_storage()

    def _buffer(self, index: int, source: UntypedStorage) -> Tensor:
        """Return the buffer of that number, made anew unless it has the size of ``source``."""
        if index == len(self._buffers) or self._buffers[index].numel() != source.nbytes():
            self._buffers[index : index + 1] = [
                torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=source.device.type == "cuda")
            ]
        return self._buffers[index]


def _key(storage: UntypedStorage) -> _Key:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _fill(pairs: Iterable[_Pair]) -> None:
    for buffer, storage in pairs:
        buffer.copy_(buffer.new_empty(0, device=storage.device).set_(storage), non_blocking=True)
