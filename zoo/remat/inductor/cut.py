"""Chooses the nodes of a joint graph that forward saves, by rules, bytes and prices.

Tested by tests/remat/inductor/test_partition.py.
"""

from __future__ import annotations

import math
import operator
import sys
from bisect import bisect_left
from collections.abc import Sequence

import torch

from zoo.remat.budget import Budget
from zoo.remat.cost import is_low_rank
from zoo.remat.inductor.nodes import (
    Node,
    base_of,
    bytes_of,
    is_computed,
    is_node,
    is_symbol,
    is_tensor,
    is_view,
    prices_of,
)
from zoo.remat.rules import MAX_DEPTH, MIN_BYTES, rule_of
from zoo.torch_internals.compiler import is_random
from zoo.torch_internals.dispatch import OperatorOverload, schema_of

aten = torch.ops.aten
MIN_RATIO = 4  # tensors that are smaller than their largest input by this factor are saved

#: Cheap operations that only graphs have, or whose results are not saved in eager training.
CHEAP_IN_GRAPHS = {
    aten.full.default, aten.full_like.default, aten.zeros.default, aten.zeros_like.default, aten.ones.default,
    aten.ones_like.default, aten.scalar_tensor.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.as_strided.default, aten.index.Tensor,
}  # fmt: skip
#: Draws numbers from a saved seed. On CUDA, the kernels of forward and backward may draw different ones.
INDUCTOR_RANDOM = "prims::inductor_random"
#: Operations of Inductor that are cheap and deterministic.
CHEAP_IN_INDUCTOR = {
    INDUCTOR_RANDOM, "prims::convert_element_type", "prims::broadcast_in_dim", "prims::iota",
    "prims::inductor_lookup_seed", "prims::_low_memory_max_pool_with_offsets",
    "prims::_low_memory_max_pool_offsets_to_indices",
}  # fmt: skip


class Cut:
    """Chooses the nodes of forward that are saved: those with the fewest bytes from which backward can be recomputed.

    Args:
    - `forward`: the nodes of forward, in order.
    - `needed`: nodes that backward reads.
    - `returned`: nodes that are outputs and therefore stay alive anyway.
    - `written`: inputs that forward overwrites at its end, so that backward must not read them.
    - `budget`: the limit on recomputing convolutions and matrix products.

    ``saved`` are the chosen nodes, and ``prices`` what convolutions, matrix products and attention cost.
    """

    def __init__(
        self,
        forward: Sequence[Node],
        needed: set[Node],
        returned: set[Node],
        written: set[Node],
        budget: Budget,
    ) -> None:
        self._forward, self._is_forward, self._needed = forward, set(forward), needed
        self._returned, self._written = returned, written
        self.prices = prices_of(forward)
        plain_bytes = sum(map(bytes_of, filter(is_computed, {base_of(node) for node in needed})))
        limit = math.inf if budget.share is None else budget.share * plain_bytes
        if self._bytes_saved_at(0.0) > limit:
            prices = sorted(self.prices.values())
            # Bytes fall as the price rises, so their negatives are sorted.
            position = bisect_left(prices, -limit, key=lambda price: -self._bytes_saved_at(price))
            if prices:
                self._bytes_saved_at(prices[min(position, len(prices) - 1)])

    def _bytes_saved_at(self, flops_per_byte: float) -> int:
        """Choose the saved nodes if recomputation may cost this much, and return their bytes."""
        self._flops_per_byte = flops_per_byte
        self.saved: set[Node] = self._minimum_cut() | self._returned
        self._limit_depth()
        return sum(map(bytes_of, filter(is_computed, {base_of(node) for node in self.saved})))

    def _minimum_cut(self) -> set[Node]:
        """Return the nodes with the fewest bytes from which all that backward needs can be recomputed."""
        import networkx as nx  # a dependency of torch; here, as it takes time to import

        flow, infinite = nx.DiGraph(), float("inf")
        for node in self._forward:
            if node.op == "output" or is_symbol(node):
                continue
            begin, end = (node, 0), (node, 1)
            if node.op != "call_function":
                capacity: float = infinite if node in self._written else 0  # alive anyway
            elif is_view(node) or not is_tensor(node):
                capacity = infinite  # what it is a view or a part of is saved
            else:
                capacity = bytes_of(node)
            flow.add_edge(begin, end, capacity=capacity)
            if node.op != "call_function" or not self.is_cheap(node) or _is_small(node):
                flow.add_edge("source", begin, capacity=infinite)
            if node in self._needed:
                flow.add_edge(end, "sink", capacity=infinite)
            for source in self._sources(node):
                flow.add_edge((source, 1), begin, capacity=infinite)
        if "source" not in flow or "sink" not in flow:
            return set()
        _, (_, after) = nx.minimum_cut(flow, "source", "sink", flow_func=nx.algorithms.flow.boykov_kolmogorov)
        return {node for node in self._forward if (node, 1) in after and (node, 0) in flow and (node, 0) not in after}

    def _sources(self, node: Node) -> list[Node]:
        """Return the forward nodes that a node is recomputed from."""
        nodes = node.all_input_nodes if is_computed(node) else []
        return [each for each in nodes if each in self._is_forward and not is_symbol(each)]

    def is_cheap(self, node: Node) -> bool:
        """Return whether a node may be recomputed: it is cheap, deterministic and has no side effects."""
        operation = node.target
        if operation is operator.getitem:
            return self.is_cheap(node.args[0])
        if not isinstance(operation, OperatorOverload) or schema_of(operation).is_mutable:
            return False
        if schema_of(operation).name in CHEAP_IN_INDUCTOR:
            return not (schema_of(operation).name == INDUCTOR_RANDOM and node.meta["val"].is_cuda)
        if node in self.prices:
            if 0 < self.prices[node] <= min(self._flops_per_byte, sys.float_info.max):
                return True
            return is_low_rank(operation, [each.meta["val"] if is_node(each) else each for each in node.args])
        if is_random(operation):
            return False
        return rule_of(operation) is not None or operation in CHEAP_IN_GRAPHS or torch.Tag.pointwise in operation.tags

    def _limit_depth(self) -> None:
        """Save nodes so that no chain of recomputed nodes is longer than `MAX_DEPTH`."""
        bases = {base_of(node) for node in self._needed}
        depths: dict[Node, int] = {}
        for node in self._forward:
            if node in self.saved or node.op != "call_function" or is_symbol(node):
                continue
            sources = [source for source in self._sources(node) if source in depths and source not in self.saved]
            depth = max((depths[source] + (source in bases) for source in sources), default=0)
            if depth > MAX_DEPTH and node in bases:
                self.saved.add(node)
            else:
                depths[node] = depth


def _is_small(node: Node) -> bool:
    """Return whether an output is so small, by itself or beside its inputs, that it is saved."""
    if not is_tensor(node) or is_view(node):
        return False
    inputs = node.args[0].all_input_nodes if node.target is operator.getitem else node.all_input_nodes
    if not inputs:
        return False
    return bytes_of(node) < MIN_BYTES or MIN_RATIO * bytes_of(node) < max(map(bytes_of, inputs))
