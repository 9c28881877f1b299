"""Records a forward pass as a graph of blocks of memory and the operations that compute them.

Tested by tests/remat/test_plan.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from zoo.ops.meta_attention import kernel_device
from zoo.remat.plan import Block, Graph, Operation
from zoo.remat.recipes import Recipe, TrackedTensor
from zoo.remat.rules import in_place_of
from zoo.torch_internals.data import memory_id

#: Device types -> the FLOP that take as long as a byte of memory traffic, and the bytes that take as long as a call.
SPEEDS = {"cpu": (16, 2**16), "cuda": (128, 2**22)}


class GraphRecorder:
    """Observes the tensors that a forward pass tracks, and records their graph.

    Args:
    - `is_permanent`: returns whether the memory of a tensor stays alive anyway and forward does not overwrite it.
    """

    def __init__(self, is_permanent: Callable[[Tensor], bool]) -> None:
        self.graph = Graph()
        self._is_permanent = is_permanent
        # address of a storage -> a weak reference to it, and the block that it contains
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._operations: weakref.WeakKeyDictionary[Recipe, int] = weakref.WeakKeyDictionary()
        self._flops = 0.0

    def note_flops(self, flops: float) -> None:
        """Record the cost of the next operation, a convolution or a matrix product."""
        self._flops = flops

    def note(self, value: TrackedTensor, tensor: Tensor) -> None:
        """Record a tensor that the forward pass begins to track."""
        value.number = len(self.graph.block_of)
        self.graph.block_of.append(self._block_of(value, tensor))

    def note_write(self, tensor: Tensor) -> None:
        """Record that an operation has overwritten memory; a part of a block stays in it."""
        if tensor.nbytes < tensor.untyped_storage().nbytes():
            return
        storage, index = self._blocks.pop(memory_id(tensor), (None, 0))
        if storage is not None and storage() is tensor.untyped_storage():
            block = self.graph.blocks[index]
            block.is_permanent, block.is_overwritten = False, True

    def note_pack(self, value: TrackedTensor) -> int:
        """Record that autograd saves a tensor; return its position among all saved tensors."""
        self.graph.packs.append(self.graph.block_of[value.number])
        return len(self.graph.packs) - 1

    def _block_of(self, value: TrackedTensor, tensor: Tensor) -> int:
        recipe, storage = value.recipe, tensor.untyped_storage()
        if recipe is not None and recipe.is_view and recipe.sources()[0].number >= 0:
            return self.graph.block_of[recipe.sources()[0].number]
        known, index = self._blocks.get(memory_id(tensor), (None, 0))
        if known is not None and known() is storage:
            if recipe is not None:  # a part was overwritten, so that no operation computes the whole
                self.graph.blocks[index].operation = None
            return index
        block = Block(storage.nbytes())
        if recipe is None:
            block.is_permanent = self._is_permanent(tensor)
        else:
            block.operation = self._operation_of(recipe, tensor)
        index = len(self.graph.blocks)
        self.graph.blocks.append(block)
        self._blocks[memory_id(tensor)] = weakref.ref(storage), index
        return index

    def _operation_of(self, recipe: Recipe, out: Tensor) -> int:
        if recipe not in self._operations:
            # Small tensors have no number. They are saved with the recipe.
            blocks = {self.graph.block_of[each.number] for each in recipe.sources() if each.number >= 0}
            sources = tuple(sorted(each for each in blocks if not self.graph.blocks[each].is_permanent))
            device = kernel_device() if out.is_meta else out.device
            flop_per_byte, bytes_of_call = SPEEDS["cpu" if device.type == "cpu" else "cuda"]
            cost = out.nbytes * (1 + len(sources)) + self._flops / flop_per_byte + bytes_of_call
            is_in_place = in_place_of(recipe.operation) is not None
            self.graph.device = str(out.device)
            self._operations[recipe] = len(self.graph.operations)
            self.graph.operations.append(Operation(sources, cost, is_in_place))
        self._flops = 0.0
        return self._operations[recipe]
