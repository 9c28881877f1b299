"""Translates joint graphs for the planner, which decides what forward saves and when backward recomputes the rest."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from zoo.remat._budget import Budget
from zoo.remat._cost import PRODUCTS, is_low_rank
from zoo.remat._plan import Block, Graph, Operation, Plan, Planner
from zoo.remat._record import cost_of
from zoo.remat._rules import rule_of
from zoo.remat.inductor._nodes import (
    Node,
    base_of,
    bytes_of,
    flops_of_node,
    inputs_of,
    is_computed,
    is_node,
    is_symbol,
    is_tensor,
    is_view,
)
from zoo.torch_internals.compiler import is_random
from zoo.torch_internals.dispatch import OperatorOverload, schema_of

aten = torch.ops.aten
MIN_BYTES = 2**14  # smaller tensors are saved: recomputing them is not worth the time
MIN_RATIO = 4  # tensors smaller than their largest input by this factor are saved

#: Cheap operations that occur only in graphs, or are not saved in eager training.
CHEAP_IN_GRAPHS = {
    aten.full.default, aten.full_like.default, aten.zeros.default, aten.zeros_like.default, aten.ones.default,
    aten.ones_like.default, aten.scalar_tensor.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.as_strided.default, aten.index.Tensor,
}  # fmt: skip
#: Draws numbers from a saved seed. On CUDA, the kernels of forward and backward may draw different numbers.
INDUCTOR_RANDOM = "prims::inductor_random"
#: Operations of Inductor that are cheap and deterministic.
CHEAP_IN_INDUCTOR = {
    INDUCTOR_RANDOM, "prims::convert_element_type", "prims::broadcast_in_dim", "prims::iota",
    "prims::inductor_lookup_seed", "prims::_low_memory_max_pool_with_offsets",
    "prims::_low_memory_max_pool_offsets_to_indices",
}  # fmt: skip


class Cut:
    """Chooses the nodes of forward to save, and when backward recomputes the others.

    Args:
    - `forward`: the nodes of forward, in order.
    - `reads`: the nodes that backward reads, in the order of the reads.
    - `returned`: outputs, which stay alive anyway.
    - `written`: inputs that forward overwrites at its end, so that backward must not read them.
    - `budget`: the limit on saved and recomputed bytes. Without one, only cheap operations are repeated.

    ``saved`` are the chosen nodes.
    """

    def __init__(
        self,
        forward: Sequence[Node],
        reads: Sequence[Node],
        returned: set[Node],
        written: set[Node],
        budget: Budget,
    ) -> None:
        self._budget, self._written = budget, written
        self._alive = returned | {base_of(each) for each in returned}
        # Inductor fuses operations, so even an operation that saves few bytes is worth its time.
        self._graph = Graph(smallest_bytes=1)
        self._blocks: dict[Node, int] = {}
        self._operations: dict[Node, int] = {}
        for node in forward:
            if not is_symbol(node) and not is_view(node) and (is_tensor(node) or not is_computed(node)):
                self._blocks[node] = len(self._graph.blocks)
                self._graph.blocks.append(self._block(node))
        self._graph.packs = [self._blocks[base_of(each)] for each in reversed(reads)]
        self._plan = self._choose(Planner(self._graph))
        self.saved = self._alive | {node for node, block in self._blocks.items() if block in self._plan.saved}

    def _choose(self, planner: Planner) -> Plan:
        if self._budget.share is None:
            return planner.least
        return planner.within(self._budget.share * planner.plain_bytes) or planner.front[-1]

    def _block(self, node: Node) -> Block:
        """Return the block of a node."""
        if node in self._written:
            return Block(bytes_of(node), is_overwritten=True)
        if node in self._alive or not is_computed(node):
            return Block(bytes_of(node), is_permanent=True)
        if not self.is_repeatable(node) or _is_small(node):
            return Block(bytes_of(node))
        return Block(bytes_of(node), self._operation_of(node))

    def _operation_of(self, node: Node) -> int:
        """Return the index of the operation that computes a node. The node may be one of several outputs."""
        operation = node.args[0] if node.target is operator.getitem else node
        if operation not in self._operations:
            bases = [base_of(other) for other in inputs_of(node) if not is_symbol(other)]
            blocks = {self._blocks[base] for base in bases if base in self._blocks}
            sources = tuple(sorted(block for block in blocks if not self._graph.blocks[block].is_permanent))
            cost = cost_of(bytes_of(operation), len(sources), flops_of_node(operation) or 0.0, node.meta["val"].device)
            self._operations[operation] = len(self._graph.operations)
            self._graph.operations.append(Operation(sources, cost, is_in_place=False))
        return self._operations[operation]

    def is_repeatable(self, node: Node) -> bool:
        """Return whether a node may be recomputed: whether it is deterministic, cheap, and free of side effects."""
        operation = node.target
        if operation is operator.getitem:
            return self.is_repeatable(node.args[0])
        if not isinstance(operation, OperatorOverload) or schema_of(operation).is_mutable:
            return False
        if schema_of(operation).name in CHEAP_IN_INDUCTOR:
            return not (schema_of(operation).name == INDUCTOR_RANDOM and node.meta["val"].is_cuda)
        if operation in PRODUCTS:
            args = [arg.meta["val"] if is_node(arg) else arg for arg in node.args]
            is_allowed = self._budget.share is not None and flops_of_node(node) is not None
            return is_allowed or is_low_rank(operation, args)
        if is_random(operation):
            return False
        return rule_of(operation) is not None or operation in CHEAP_IN_GRAPHS or torch.Tag.pointwise in operation.tags

    def frees(self, node: Node, time: int, is_new: bool) -> bool:
        """Return whether backward frees a recomputed node after its read number ``time``.

        Args:
        - `is_new`: whether the node was recomputed for this read.
        """
        block = self._blocks.get(base_of(node), -1)
        return block not in self._plan.stored[time] if is_new else block in self._plan.freed[time]


def _is_small(node: Node) -> bool:
    """Return whether an output is too small to recompute, by itself or relative to its inputs."""
    if not is_tensor(node) or is_view(node):
        return False
    inputs = inputs_of(node)
    return bool(inputs) and (bytes_of(node) < MIN_BYTES or MIN_RATIO * bytes_of(node) < max(map(bytes_of, inputs)))
