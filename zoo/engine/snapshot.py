"""Copies of the training state in host memory, which are written to a file while the state itself changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, UntypedStorage

_Key = tuple[torch.device, int, int]


class Snapshots:
    """Copies nested containers of tensors into buffers that the next copy reuses.

    Allocating fresh memory takes longer than the copy itself, as the system has to map every page of it. CUDA tensors
    are copied to pinned memory, which the device fills directly.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, tree: Any) -> Any:
        """Return a copy of ``tree``, of dicts, lists and tuples, with all tensors on the CPU; waits for the device.

        It overwrites the previous copy. Tensors that share memory in ``tree`` share it in the copy, so that both are
        saved as the same bytes.
        """
        copied: dict[_Key, Tensor] = {}
        snapshot = self._copy(tree, copied)
        del self._buffers[len(copied) :]
        for device in {key[0] for key in copied if key[0].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return snapshot

    def _copy(self, tree: Any, copied: dict[_Key, Tensor]) -> Any:
        if isinstance(tree, Tensor):
            storage = self._copy_storage(tree.untyped_storage(), copied)
            return torch.empty(0, dtype=tree.dtype).set_(storage, tree.storage_offset(), tree.size(), tree.stride())
        if isinstance(tree, dict):
            snapshot = copy.copy(tree)  # keeps the version numbers of modules, an attribute of a state dict
            for key, value in tree.items():
                snapshot[key] = self._copy(value, copied)
            return snapshot
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._copy(value, copied) for value in tree)
        return tree

    def _copy_storage(self, storage: UntypedStorage, copied: dict[_Key, Tensor]) -> UntypedStorage:
        key = storage.device, storage.data_ptr(), storage.nbytes()
        if key not in copied:
            buffer = self._buffer(len(copied), storage)
            buffer.copy_(buffer.new_empty(0, device=storage.device).set_(storage), non_blocking=True)
            copied[key] = buffer
        return copied[key].untyped_storage()

    def _buffer(self, index: int, source: UntypedStorage) -> Tensor:
        """Return the buffer with this index, allocated anew unless it has the size of ``source``."""
        if index == len(self._buffers) or self._buffers[index].numel() != source.nbytes():
            self._buffers[index : index + 1] = [
                torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=source.device.type == "cuda")
            ]
        return self._buffers[index]
