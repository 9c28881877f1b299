"""Copies of a state in host memory, which can be written to a file while the state itself changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

_Key = tuple[torch.device, int, int]


class Snapshots:
    """Copies trees of tensors; the memory of one copy is kept, and the next one overwrites it.

    Fresh memory costs more time than the copy itself, as the system has to hand out every page of it. The copies of
    CUDA tensors are in pinned memory, which the device fills directly.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, tree: Any) -> Any:
        """Return a copy of ``tree``, of dicts, lists and tuples, with all tensors on the CPU; the one before is lost.

        Tensors that share memory in ``tree`` do so in the copy, so that both make the same file. It waits for the
        device.
        """
        copies: dict[_Key, torch.UntypedStorage] = {}
        taken = self._copy(tree, copies)
        del self._buffers[len(copies) :]
        for device in {key[0] for key in copies if key[0].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return taken

    def _copy(self, tree: Any, copies: dict[_Key, torch.UntypedStorage]) -> Any:
        if isinstance(tree, Tensor):
            storage = self._copy_storage(tree.untyped_storage(), copies)
            place = tree.storage_offset(), tree.size(), tree.stride()
            return torch.empty(0, dtype=tree.dtype).set_(storage, *place)
        if isinstance(tree, dict):
            taken = copy.copy(tree)  # with the version numbers of modules, which are an attribute of a state dict
            for key, value in tree.items():
                taken[key] = self._copy(value, copies)
            return taken
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._copy(value, copies) for value in tree)
        return tree

    def _copy_storage(
        self, storage: torch.UntypedStorage, copies: dict[_Key, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        key = storage.device, storage.data_ptr(), storage.nbytes()
        if key not in copies:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copies[key] = self._buffer(len(copies), source).copy_(source, non_blocking=True).untyped_storage()
        return copies[key]

    def _buffer(self, index: int, source: Tensor) -> Tensor:
        """Return the buffer of that number, made anew unless it has the size of ``source``."""
        if index == len(self._buffers) or self._buffers[index].shape != source.shape:
            self._buffers[index : index + 1] = [
                torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.device.type == "cuda")
            ]
        return self._buffers[index]
