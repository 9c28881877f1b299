"""The rules applied to a joint graph of AOTAutograd: what forward saves, and what backward recomputes from it.

AOTAutograd traces forward and backward of a network into one joint graph of functional operations. `partition` saves
what is expensive, random or small, clones every other forward node that backward reads into the backward part, in front
of its first reader, and lets torch split the graph there.
"""

from __future__ import annotations

import copy
import operator
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zoo.remat import cudnn_norm
from zoo.remat.budget import Budget
from zoo.remat.cudnn_norm import CUDNN_BATCH_NORM
from zoo.remat.operations import (
    ADD,
    ATTENTIONS,
    CONVOLUTION,
    MASKS,
    PRODUCTS,
    RELU,
    RULES,
    apply_line,
    bits_of,
    break_tie,
    first_tensor,
    flops_of,
    has_exact_line,
    line_of,
    mask_of,
    reads_only_shape,
    reads_only_signs,
    rectified_of,
    signs_of,
)
from zoo.torch_internals import (
    BACKWARD_TAG,
    BATCH_NORM,
    BATCH_NORM_OF_BATCH,
    CAST,
    OperatorOverload,
    default_partition,
    is_forward_node,
    is_tangent_node,
    schema_of,
    size_hint,
)

aten = torch.ops.aten
Node = Any  # torch.fx.Node, whose type stubs differ between versions of torch
MAX_DEPTH = 4  # recomputed nodes that backward reads in a chain: bounds the peak memory of one recomputation
MIN_BYTES = 2**14  # smaller tensors are saved
MIN_RATIO = 4  # as are tensors that are smaller than their largest input by this factor

#: Cheap operations that only graphs have, or whose results are not saved in eager training.
OF_GRAPHS = {
    aten.full.default, aten.full_like.default, aten.zeros.default, aten.zeros_like.default, aten.ones.default,
    aten.ones_like.default, aten.scalar_tensor.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.as_strided.default, aten.index.Tensor,
}  # fmt: skip
#: Operations of Inductor that are cheap and deterministic; those that draw numbers do so from a saved seed.
OF_INDUCTOR = {
    "prims::convert_element_type", "prims::broadcast_in_dim", "prims::iota", "prims::inductor_random",
    "prims::inductor_lookup_seed", "prims::_low_memory_max_pool_with_offsets",
    "prims::_low_memory_max_pool_offsets_to_indices",
}  # fmt: skip
NORMS = {BATCH_NORM, BATCH_NORM_OF_BATCH, CUDNN_BATCH_NORM}
#: Operations of functionalized graphs that draw a mask, as in `MASKS`.
DRAWN_MASKS = {**MASKS, aten.bernoulli.p: None}


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    num_fwd_outputs: int,
    budget: Budget | None = None,
    is_eager: bool = True,
    cached_casts: Sequence[bool] = (),
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a joint graph, of which forward returns little for backward.

    Args:
    - `joint`: changed in place.
    - `num_fwd_outputs`: number of the outputs that belong to forward; they come first.
    - `budget`: the limit on recomputing convolutions and matrix products. By default none is recomputed.
    - `is_eager`: whether the graphs run operation by operation, so that they may call functions of this package: batch
      norms are recomputed from their saved statistics where that is exact, and dropout masks are saved as bits.
    - `cached_casts`: for each input of forward, whether eager autocast casts it once for all its uses. Empty: none.
    - `options`: those of torch's default partitioner.
    """
    options.pop("compiler", None)  # Inductor names itself to its own partitioner
    if is_eager:
        _share_casts(joint.graph, num_fwd_outputs, cached_casts)
    joint.graph.eliminate_dead_code()
    budget = budget or Budget()
    if budget.peak_bytes is not None:
        budget = _budget_within(budget, partial(_rewritten, joint.graph, num_fwd_outputs, is_eager=is_eager))
    _rewrite(joint.graph, num_fwd_outputs, budget, is_eager)
    joint.graph.lint()
    joint.recompile()
    return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)


def _rewrite(graph: Any, num_fwd_outputs: int, budget: Budget, is_eager: bool) -> None:
    _Rewriting(graph, num_fwd_outputs, budget, is_eager).run()
    graph.eliminate_dead_code()


def _rewritten(graph: Any, num_fwd_outputs: int, budget: Budget, is_eager: bool) -> Any:
    """Return a rewritten copy of a joint graph."""
    graph = copy.deepcopy(graph)
    _rewrite(graph, num_fwd_outputs, budget, is_eager)
    return graph


def _budget_within(limited: Budget, rewritten: Callable[[Budget], Any]) -> Budget:
    """Return the lowest budget in FLOP per byte with which the peak of a step stays within the limit.

    Args:
    - `rewritten`: returns a copy of the joint graph that is rewritten with a budget.

    Raises ConfigError if the limit is impossible.
    """
    assert limited.peak_bytes is not None
    budget = Budget()
    graph = rewritten(budget)
    if _peak_of(graph) <= limited.peak_bytes:
        return budget
    prices = sorted(_prices(graph.nodes).values())
    budgets = [budget, *map(Budget, prices)]
    # Peaks fall as the price rises, so their negatives are sorted.
    position = bisect_left(budgets, -limited.peak_bytes, key=lambda each: -_peak_of(rewritten(each)))
    if position == len(budgets):
        limited.check_possible(_peak_of(rewritten(budgets[-1])))
    return budgets[min(position, len(budgets) - 1)]


def _peak_of(graph: Any) -> int:
    """Return the most bytes that the tensors of a rewritten joint graph take at one time.

    Inputs and outputs, such as parameters and their gradients, stay alive. The scratch memory of operations is not
    included.
    """
    last_use: dict[Node, int] = {}
    for index, node in enumerate(graph.nodes):
        for each in (node, *node.all_input_nodes):
            last_use[_base(each)] = index  # what an output or a view reads lives as long
    dying: dict[int, list[Node]] = {}
    for node, index in last_use.items():
        dying.setdefault(index, []).append(node)
    live = peak = sum(_bytes_of(node) for node in graph.nodes if node.op == "placeholder")
    for index, node in enumerate(graph.nodes):
        if _is_computed(node) and _base(node) is node:
            live += _bytes_of(node)
            peak = max(peak, live)
        live -= sum(_bytes_of(each) for each in dying.get(index, ()) if _is_computed(each))
    return peak


class _Rewriting:
    """Gives the backward nodes of a joint graph clones of the forward nodes that are not saved."""

    def __init__(self, graph: Any, num_fwd_outputs: int, budget: Budget, is_eager: bool) -> None:
        self._graph, self._budget, self._is_eager = graph, budget, is_eager
        self._flops_per_byte = budget.flops_per_byte
        nodes = list(graph.nodes)
        # As torch's default partitioner: everything up to the last node that was traced in forward belongs to it.
        end = 1 + max(index for index, node in enumerate(nodes) if node.op == "placeholder" or is_forward_node(node))
        self._forward = [node for node in nodes[:end] if not is_tangent_node(node)]
        self._is_forward = set(self._forward)
        self._backward = [node for node in nodes[end:] if node.op == "call_function" and not _is_epilogue(node)]
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        self._prices = _prices(self._forward)
        self._returned = {node for node in outputs[num_fwd_outputs:] if is_node(node)} & self._is_forward
        self._replace_unread()
        self._unpacked = dict(self._pack_masks()) if is_eager else {}
        self._needed = {
            self._current(source)
            for node in self._backward
            for source in node.all_input_nodes
            if source in self._is_forward and _is_tensor(source)
        }
        # Placeholders that are written at the end of forward: backward must not read them.
        self._written = {node.args[0] for node in nodes if node.target is aten.copy_.default}
        self._clones: dict[Node, Node] = {}
        self._saved: set[Node] = set()

    def run(self) -> None:
        """Rewrite the graph."""
        self._choose()
        for node in self._backward:
            node.args = map_arg(node.args, partial(self._at, user=node))
            node.kwargs = map_arg(node.kwargs, partial(self._at, user=node))

    def _pack_masks(self) -> Iterator[tuple[Node, Node]]:
        """Insert nodes that pack each dropout mask into bits and unpack it; yield the mask and the unpacked one."""
        for drawn in [node for node in self._forward if node.target in DRAWN_MASKS]:
            position = DRAWN_MASKS[drawn.target]
            outputs = {0: drawn} if position is None else {node.args[1]: node for node in drawn.users}
            mask = outputs.get(position or 0)
            if mask is None or _bytes_of(mask) < MIN_BYTES:
                continue
            if not _has_static_shape(mask):
                continue
            value = mask.meta["val"]
            bits = self._insert(mask, bits_of, (mask,), {}, _bits_like(value))
            unpacked = self._insert(bits, mask_of, (bits, value.shape, value.dtype), {}, value)
            yield mask, unpacked

    def _replace_unread(self) -> None:
        """Let backward read an uninitialized tensor where it reads only the shape of an input, as frozen layers do.

        Where it reads only the signs of the output of a ReLU, let it read a tensor that is computed from their bits.
        """
        for node in self._backward:
            read: Any = node.args[1] if len(node.args) > 1 else None
            source: Any = _base(read) if is_node(read) else None
            if source not in self._is_forward or not _has_static_shape(read):
                continue
            value = read.meta["val"]
            layout = list(value.shape), list(value.stride())
            if reads_only_shape(node.target, node.args):
                options = {"dtype": value.dtype, "device": value.device}
                node.update_arg(1, self._call(node, aten.empty_strided.default, layout, options, value))
            elif self._is_eager and reads_only_signs(node.target, node.args) and source.target is RELU:
                bits = self._insert(source, signs_of, (source,), {}, _bits_like(value))
                args = bits, *layout, value.dtype, value.device
                node.update_arg(1, self._insert(bits, rectified_of, args, {}, value))
        self._graph.eliminate_dead_code()  # views of what was replaced
        self._forward = [node for node in self._forward if node.users or not _is_computed(node)]
        self._backward = [node for node in self._backward if node.users]
        self._is_forward = set(self._forward)

    def _insert(self, after: Node, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """Insert a node of forward."""
        with self._graph.inserting_after(after):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {**after.meta, "val": value}
        self._forward.insert(self._forward.index(after) + 1, node)
        self._is_forward.add(node)
        return node

    def _current(self, node: Node) -> Node:
        """Return the node that is recomputed in place of ``node``: for a mask, the unpacked one."""
        return self._unpacked.get(node, node)

    def _choose(self) -> None:
        """Choose what is saved: the least, or with a budget in bytes the cheapest choice within it."""
        plain_bytes = sum(map(_bytes_of, filter(_is_computed, {_base(node) for node in self._needed})))
        limit = self._budget.held_limit(plain_bytes)
        if self._bytes_saved_at(self._budget.flops_per_byte) > limit:
            prices = sorted(self._prices.values())
            # Bytes fall as the price rises, so their negatives are sorted.
            position = bisect_left(prices, -limit, key=lambda price: -self._bytes_saved_at(price))
            if prices:
                self._bytes_saved_at(prices[min(position, len(prices) - 1)])

    def _bytes_saved_at(self, flops_per_byte: float) -> int:
        """Choose what is saved if recomputation may cost this much, and return its bytes."""
        self._flops_per_byte = flops_per_byte
        self._saved = self._cut() | self._returned
        self._limit_depth()
        return sum(map(_bytes_of, filter(_is_computed, {_base(node) for node in self._saved})))

    def _cut(self) -> set[Node]:
        """Return the nodes with the fewest bytes from which all that backward needs can be recomputed."""
        import networkx as nx  # a dependency of torch; here, as it takes time to import

        flow, infinite = nx.DiGraph(), float("inf")
        for node in self._forward:
            if node.op == "output" or _is_symbol(node):
                continue
            begin, end = (node, 0), (node, 1)
            if node.op != "call_function":
                capacity: float = infinite if node in self._written else 0  # alive anyway
            elif _is_view(node) or not _is_tensor(node):
                capacity = infinite  # what it is a view or a part of is saved
            else:
                capacity = _bytes_of(node)
            flow.add_edge(begin, end, capacity=capacity)
            if node.op != "call_function" or not self._is_cheap(node) or _is_small(node):
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
        if node.op != "call_function":
            return []
        norm = _norm_of(node)
        # A norm is recomputed without its running statistics, which it has updated.
        nodes = node.all_input_nodes if norm is None else [arg for arg in norm.args[:3] if is_node(arg)]
        return [self._current(each) for each in nodes if each in self._is_forward and not _is_symbol(each)]

    def _is_cheap(self, node: Node) -> bool:
        """Return whether a node may be recomputed: it is cheap, deterministic and has no side effects."""
        operation = node.target
        if operation in (operator.getitem, mask_of, signs_of, rectified_of):
            return True
        if not isinstance(operation, OperatorOverload) or schema_of(operation).is_mutable:
            return False
        if schema_of(operation).name in OF_INDUCTOR:
            return True
        if _has_price(node):
            return 0 < self._prices[node] <= min(self._flops_per_byte, sys.float_info.max)
        if torch.Tag.nondeterministic_seeded in operation.tags:
            return False
        if operation in RULES or operation in OF_GRAPHS or operation in NORMS:
            return True
        return torch.Tag.pointwise in operation.tags

    def _limit_depth(self) -> None:
        """Save nodes so that no chain of recomputed nodes is longer than `MAX_DEPTH`."""
        bases = {_base(node) for node in self._needed}
        depths: dict[Node, int] = {}
        for node in self._forward:
            if node in self._saved or node.op != "call_function" or _is_symbol(node):
                continue
            sources = [source for source in self._sources(node) if source in depths and source not in self._saved]
            depth = max((depths[source] + (source in bases) for source in sources), default=0)
            if depth > MAX_DEPTH and node in bases:
                self._saved.add(node.args[0] if node.target is rectified_of else node)
            else:
                depths[node] = depth

    def _at(self, source: Node, user: Node) -> Node:
        """Return a node with the value of ``source`` that backward can read, computed before its first reader."""
        if source not in self._is_forward or source.op != "call_function" or _is_symbol(source):
            return source
        source = self._current(source)
        if source.target is rectified_of and source.args[0] not in self._saved:
            source = source.args[0].args[0]  # the output of the ReLU itself takes no more memory
        if source in self._saved:
            return source
        if source not in self._clones:
            self._clones[source] = self._norm(source, user) or self._clone(source, user)
        return self._clones[source]

    def _clone(self, source: Node, user: Node) -> Node:
        if not self._is_cheap(source):
            return source
        args = map_arg(source.args, lambda each: self._at(each, user))
        kwargs = map_arg(source.kwargs, lambda each: self._at(each, user))
        rule = RULES.get(source.target) if self._is_eager else None
        return self._call(user, source.target if rule is None else rule.repeat, args, kwargs, source.meta["val"])

    def _norm(self, source: Node, user: Node) -> Node | None:
        """Return the recomputed output of a training-mode batch norm, with the sum and ReLU after it if they are all
        that reads it; None for other nodes."""
        norm, shortcut, is_rectified = self._match_norm(source)
        if norm is None:
            return None
        x, weight, bias = norm.args[:3]
        momentum, eps = norm.args[-2:]
        value = source.meta["val"]
        at = self._at(x, user)
        outputs = {node.args[1]: node for node in norm.users if node.target is operator.getitem}
        has_statistics = self._is_eager and {1, 2} <= outputs.keys()
        if norm.target is CUDNN_BATCH_NORM:
            return self._call(user, cudnn_norm.recompute, (at, weight, bias, momentum, eps), {}, value)
        if has_statistics and norm.target is BATCH_NORM and value.is_cuda:
            args = at, weight, bias, outputs[1], outputs[2], eps
            return self._call(user, aten.batch_norm_elemt.default, args, {}, value)
        if not (has_statistics and _has_exact_line(norm)):
            again = self._call(
                user, BATCH_NORM_OF_BATCH, (at, weight, bias, True, momentum, eps), {}, norm.meta["val"][:3]
            )
            return self._call(user, operator.getitem, (again, 0), {}, value)
        line = self._call(user, line_of, (weight, bias, outputs[1], outputs[2]), {}, (outputs[1].meta["val"],) * 2)
        alpha, beta = (
            self._call(user, operator.getitem, (line, index), {}, outputs[1].meta["val"]) for index in range(2)
        )
        other = None if shortcut is None else self._at(shortcut, user)
        return self._call(user, apply_line, (at, alpha, beta, other, is_rectified), {}, value)

    def _match_norm(self, source: Node) -> tuple[Node | None, Node | None, bool]:
        """Return a batch norm whose output ``source`` is, or is after a sum with a shortcut or a ReLU or both."""
        norm = _norm_of(source)
        if norm is not None or not self._is_eager:
            return norm, None, False
        node, shortcut, is_rectified = source, None, False
        if node.target is RELU and self._is_passed_through(node.args[0]):
            node, is_rectified = node.args[0], True
        if node.target is ADD and not node.kwargs:
            for first, second in (node.args[:2], node.args[1::-1]):
                is_alike = is_node(second) and are_alike(second, node)
                if is_alike and _norm_of(first) is not None and self._is_passed_through(first):
                    node, shortcut = first, second
                    break
        norm = None if node is source else _norm_of(node)
        return (norm, shortcut, is_rectified) if norm is not None and _has_exact_line(norm) else (None, None, False)

    def _is_passed_through(self, node: Any) -> bool:
        """Return whether backward reads a node only as the input of others, so that it need not exist by itself."""
        return is_node(node) and node not in self._needed and node not in self._saved

    def _call(self, user: Node, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        with self._graph.inserting_before(user):
            return _computed(self._graph, target, args, kwargs, value)


def _share_casts(graph: Any, num_fwd_outputs: int, cached_casts: Sequence[bool]) -> None:
    """Sum the gradients of an input that autocast has cast several times before they are cast, as eager autocast does.

    Eager autocast caches the casts of parameters, so that the gradients of all uses are summed in the lower precision.
    AOTAutograd traces a cast for each use, and sums in float32.
    """
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not is_tangent_node(node)]
    gradients = outputs[num_fwd_outputs:]
    if len(inputs) != len(cached_casts) or len(gradients) != len(inputs):
        return
    for node, gradient, is_cached in zip(inputs, gradients, cached_casts, strict=True):
        casts = [user for user in node.users if user.target is CAST]
        if is_cached and len(casts) > 1 and is_node(gradient):
            terms = list(_terms(gradient))
            low = [term.args[0] for term in terms if term.target is CAST]
            if len(terms) - len(low) > 1 or len({term.meta["val"].dtype for term in low}) != 1:
                continue
            with graph.inserting_before(graph.output_node()):
                total = low[0]
                for term in low[1:]:
                    total = _computed(graph, ADD, (total, term), {}, term.meta["val"])
                total = _computed(graph, CAST, (total,), {"dtype": node.meta["val"].dtype}, node.meta["val"])
                for term in terms:
                    if term.target is not CAST:
                        total = _computed(graph, ADD, (total, term), {}, node.meta["val"])
            graph.output_node().replace_input_with(gradient, total)


def _terms(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum, in the order in which they are added."""
    if node.target is ADD and not node.kwargs and len(node.users) == 1:
        for term in node.args:
            yield from _terms(term) if is_node(term) else ()
    else:
        yield node


def _computed(graph: Any, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
    """Append a node of backward."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {**BACKWARD_TAG, "val": value}
    return node


def is_node(value: object) -> bool:
    """Return whether an argument of a node is another node."""
    return isinstance(value, fx.Node)


def _is_epilogue(node: Node) -> bool:
    """Return whether a node writes into an input of forward, such as running statistics."""
    return node.target is aten.copy_.default and not node.meta.get("autograd_backward")


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_symbol(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_view(node: Node) -> bool:
    rule = RULES.get(node.target)
    return (rule is not None and rule.is_view) or node.target is aten.as_strided.default


def _base(node: Node) -> Node:
    """Return the node whose memory a node is a view of."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _bytes_of(node: Node) -> int:
    """Return the bytes of a tensor; with symbolic sizes, those of the traced example."""
    return _bytes_of_value(node.meta.get("val"))


def _bytes_of_value(value: Any) -> int:
    return size_hint(value.numel()) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def _has_static_shape(node: Node) -> bool:
    """Return whether a node is a tensor whose sizes and strides are no symbols, so that they may be arguments."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(type(each) is int for each in (*value.shape, *value.stride()))


def _bits_like(value: Tensor) -> Tensor:
    """Return an example of `bits_of` a tensor."""
    return value.new_empty(-(-value.numel() // 8), dtype=torch.uint8)


def _is_small(node: Node) -> bool:
    """Return whether an output is so small, by itself or beside its inputs, that it is saved."""
    if not _is_tensor(node) or _is_view(node):
        return False
    inputs = node.args[0].all_input_nodes if node.target is operator.getitem else node.all_input_nodes
    if not inputs or node.target in (mask_of, signs_of):
        return False
    return _bytes_of(node) < MIN_BYTES or MIN_RATIO * _bytes_of(node) < max(map(_bytes_of, inputs))


def _is_computed(node: Node) -> bool:
    return node.op == "call_function"


def _has_price(node: Node) -> bool:
    return node.target is CONVOLUTION or node.target in PRODUCTS or node.target in ATTENTIONS


def _prices(nodes: Iterable[Node]) -> dict[Node, float]:
    """Return what convolutions, matrix products and attention cost, in forward and then in backward."""
    priced = filter(_has_price, nodes)
    return {node: break_tie(_price(node), position) for position, node in enumerate(priced)}


def _price(node: Node) -> float:
    """Return the FLOP per byte of output of a convolution, matrix product or attention; infinity if it is random."""
    args = map_arg(node.args, lambda each: each.meta["val"])
    flops = flops_of(node.target, args, node.meta["val"])
    return float("inf") if flops is None else size_hint(flops) / max(1, _bytes_of_value(first_tensor(node.meta["val"])))


def _norm_of(node: Any) -> Node | None:
    """Return the training-mode batch norm whose first output a node is."""
    if not is_node(node) or node.target is not operator.getitem or node.args[1] != 0:
        return None
    norm = node.args[0]
    if norm.target in (BATCH_NORM, CUDNN_BATCH_NORM):
        is_training = norm.args[5]
    else:
        is_training = norm.target is BATCH_NORM_OF_BATCH and norm.args[3]
    return norm if is_training else None


def _has_exact_line(norm: Node) -> bool:
    """Return whether `apply_line` recomputes a norm bit for bit."""
    if norm.target is CUDNN_BATCH_NORM:
        return False
    x, weight, bias = map_arg(norm.args[:3], lambda node: node.meta["val"])
    return has_exact_line(x, weight, bias, norm.meta["val"][1])


def are_alike(a: Node, b: Node) -> bool:
    """Return whether two nodes are tensors of the same dtype, shape and strides."""
    first, second = a.meta.get("val"), b.meta.get("val")
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    )
