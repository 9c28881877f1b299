"""Records a forward pass as a graph: blocks of memory, and the operations that compute them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from zoo.ops.meta_attention import kernel_device_of
from zoo.remat._plan import Block, Graph, Operation
from zoo.remat._recipes import Recipe, TrackedTensor
from zoo.remat._rules import in_place_of
from zoo.torch_internals.data import memory_id
from zoo.torch_internals.dispatch import next_node_number

#: Device type -> FLOP per byte of memory traffic at the same time, and bytes of memory traffic that take as long as a
#: kernel launch.
SPEEDS = {"cpu": (16, 2**16), "cuda": (128, 2**22)}


def cost_of(num_bytes: int, num_sources: int, flops: float, device: torch.device) -> float:
    """Return the estimated time of an operation, in bytes of memory traffic.

    Args:
    - `num_bytes`: the size of its output.
    - `num_sources`: how many tensors it reads.
    """
    flop_per_byte, bytes_of_call = SPEEDS["cpu" if device.type == "cpu" else "cuda"]
    return num_bytes * (1 + num_sources) + flops / flop_per_byte + bytes_of_call


class GraphRecorder:
    """Observer that records the graph of a forward pass.

    Args:
    - `is_permanent`: returns whether the memory of a tensor stays alive anyway and forward does not overwrite it.
    """

    def __init__(self, is_permanent: Callable[[Tensor], bool]) -> None:
        self.graph = Graph()
        self._is_permanent = is_permanent
        # address of a storage -> a weak reference to it, and its block
        self._blocks: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._operations: weakref.WeakKeyDictionary[Recipe, int] = weakref.WeakKeyDictionary()
        self._first_node = next_node_number()
        self._flops = 0.0

    def note_flops(self, flops: float) -> None:
        """Record the FLOP of the next operation, a convolution or a matrix product."""
        self._flops = flops

    def note(self, tracked: TrackedTensor, tensor: Tensor) -> None:
        """Record a newly tracked tensor."""
        tracked.number = len(self.graph.block_of)
        self.graph.block_of.append(self._block_of(tracked, tensor))

    def note_write(self, tensor: Tensor) -> None:
        """Record that an operation has overwritten the memory of a tensor."""
        storage, index = self._blocks.get(memory_id(tensor), (None, 0))
        if storage is None or storage() is not tensor.untyped_storage():
            return
        block = self.graph.blocks[index]
        block.is_permanent = False
        if tensor.nbytes < tensor.untyped_storage().nbytes():
            self._note_written_part(index)
        else:
            block.is_overwritten = True
            del self._blocks[memory_id(tensor)]

    def _note_written_part(self, index: int) -> None:
        """Record that a block, and blocks computed from it so far, cannot be recomputed."""
        operations = self.graph.operations
        for other, block in enumerate(self.graph.blocks):
            if other == index or (block.operation is not None and index in operations[block.operation].sources):
                block.operation = None

    def note_pack(self, tracked: TrackedTensor) -> int:
        """Record that autograd saves a tensor; return its position among all saved tensors."""
        self.graph.packs.append(self.graph.block_of[tracked.number])
        self.graph.nodes.append(next_node_number() - self._first_node)
        return len(self.graph.packs) - 1

    def _block_of(self, tracked: TrackedTensor, tensor: Tensor) -> int:
        recipe, storage = tracked.recipe, tensor.untyped_storage()
        if recipe is not None and recipe.is_view:
            (base, *_) = recipe.sources()
            if base.number >= 0:
                return self.graph.block_of[base.number]
            recipe = None  # the base is small and is saved with the recipe
        known, index = self._blocks.get(memory_id(tensor), (None, 0))
        if known is not None and known() is storage:
            self.graph.blocks[index].operation = None  # no recipe computes this part of the block
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
            blocks = [self.graph.block_of[source.number] for source in recipe.sources() if source.number >= 0]
            sources = tuple(dict.fromkeys(block for block in blocks if not self.graph.blocks[block].is_permanent))
            cost = cost_of(out.nbytes, len(sources), self._flops, kernel_device_of(out))
            is_in_place = _may_run_in_place(recipe, out) and blocks.count(blocks[0]) == 1
            self.graph.device = str(out.device)
            self._operations[recipe] = len(self.graph.operations)
            self.graph.operations.append(Operation(sources, cost, is_in_place))
        self._flops = 0.0
        return self._operations[recipe]


def _may_run_in_place(recipe: Recipe, out: Tensor) -> bool:
    """Return whether `recipes.compute` may overwrite the first input of a recipe once nothing else needs it."""
    first, sources = recipe.args[0] if recipe.args else None, recipe.sources()
    return (
        type(first) is TrackedTensor
        and first.number >= 0
        and first.recipe is not None
        and not first.recipe.is_view
        and first.dtype == out.dtype
        and in_place_of(recipe.operation) is not None
        and len({(source.stride, source.dtype) for source in sources}) == 1
    )
