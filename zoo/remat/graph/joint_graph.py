"""The rules applied to a joint graph of AOTAutograd: what forward saves, and what backward recomputes from it.

AOTAutograd traces forward and backward of a network into one joint graph of functional operations. `partition` saves
what is expensive, random or small, clones every other forward node that backward reads into the backward part, in front
of its first reader, and lets torch split the graph there.

Tested by tests/remat/test_capture_graphs.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zoo.remat.budget import Budget
from zoo.remat.graph import cudnn_norm, cut
from zoo.remat.graph.autocast import Casts
from zoo.remat.graph.cudnn_norm import CUDNN_BATCH_NORM
from zoo.remat.graph.nodes import (
    Node,
    are_alike,
    base_of,
    bytes_of,
    insert_in_backward,
    is_computed,
    is_node,
    is_symbol,
    is_tensor,
    norm_is_fusible,
    norm_of,
    outputs_of,
)
from zoo.remat.norm_order import normalize, order_of
from zoo.remat.rules import (
    ADD,
    MASKS,
    RELU,
    RULES,
    apply_line,
    bits_of,
    line_of,
    mask_of,
    own,
    reads_only_shape,
    reads_only_signs,
    rectified_of,
    signs_of,
)
from zoo.torch_internals.compiler import (
    BATCH_NORM,
    BATCH_NORM_OF_BATCH,
    default_partition,
    is_forward_node,
    is_tangent_node,
    overwritten_inputs,
)

aten = torch.ops.aten
#: Operations of functionalized graphs that draw a mask, as in `MASKS`.
DRAWN_MASKS = {**MASKS, aten.bernoulli.p: None}


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    num_fwd_outputs: int,
    budget: Budget | None = None,
    is_eager: bool = True,
    casts: Casts | None = None,
    parameters: Sequence[bool] = (),
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a joint graph, of which forward returns little for backward.

    Args:
    - `joint`: changed in place.
    - `num_fwd_outputs`: number of the outputs that belong to forward; they come first.
    - `budget`: the limit on recomputing convolutions and matrix products. By default none is recomputed.
    - `is_eager`: whether the graphs run operation by operation, so that they may call functions of this package: batch
      norms are recomputed from their saved statistics where that is exact, and dropout masks are saved as bits.
    - `casts`: the inputs of forward that eager autocast casts once for all their uses.
    - `parameters`: for each input of forward, whether it is a parameter. Empty: none. Of other inputs in memory that
      torch does not own, backward recomputes from a copy.
    - `options`: the options of torch's default partitioner.
    """
    options.pop("compiler", None)  # Inductor names itself to its own partitioner
    graph = joint.graph
    if casts is not None:
        casts.share(graph, num_fwd_outputs)
    graph.eliminate_dead_code()

    _Rewriting(graph, num_fwd_outputs, budget or Budget(), is_eager, parameters).run()
    graph.eliminate_dead_code()
    graph.lint()
    joint.recompile()
    return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)


class _Rewriting:
    """Gives the backward nodes of a joint graph clones of the forward nodes that are not saved."""

    def __init__(
        self, graph: Any, num_fwd_outputs: int, budget: Budget, is_eager: bool, parameters: Sequence[bool]
    ) -> None:
        self._graph, self._is_eager = graph, is_eager
        nodes = list(graph.nodes)
        # As torch's default partitioner: everything up to the last node that was traced in forward belongs to it.
        end = 1 + max(index for index, node in enumerate(nodes) if node.op == "placeholder" or is_forward_node(node))
        self._forward = [node for node in nodes[:end] if not is_tangent_node(node)]
        self._is_forward = set(self._forward)
        self._backward = [node for node in nodes[end:] if is_computed(node) and not _is_epilogue(node)]
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        returned = {node for node in outputs[num_fwd_outputs:] if is_node(node)} & self._is_forward
        self._replace_unread()
        self._unpacked = dict(self._pack_masks()) if is_eager else {}
        self._of_masks = set(self._unpacked.values())  # and what is computed from them alone
        for node in self._forward:
            sources = {self._unpacked.get(each, each) for each in node.all_input_nodes}
            if sources and sources <= self._of_masks:
                self._of_masks.add(node)
        self._needed = {
            self._unpacked.get(source, source)
            for node in self._backward
            for source in node.all_input_nodes
            if source in self._is_forward and is_tensor(source)
        }
        written = {node.args[0] for node in nodes if node.target is aten.copy_.default} | overwritten_inputs(graph)
        self._cut = cut.Cut(self._forward, self._needed, returned, written, self._unpacked, budget)
        self._saved = self._cut.saved
        inputs = [node for node in self._forward if node.op == "placeholder"]
        are_parameters = parameters if len(parameters) == len(inputs) else [False] * len(inputs)
        # Another program may refill memory that torch does not own, and no version tells of it.
        self._foreign = {
            node
            for node, is_parameter in zip(inputs, are_parameters, strict=True)
            if is_eager and is_tensor(node) and not is_parameter
        }
        self._copies: dict[Node, Node] = {}
        self._clones: dict[tuple[Node, bool], Node] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        for node in self._backward:
            node.args = map_arg(node.args, partial(self._at, user=node, is_recipe=False))
            node.kwargs = map_arg(node.kwargs, partial(self._at, user=node, is_recipe=False))

    def _pack_masks(self) -> Iterator[tuple[Node, Node]]:
        """Insert nodes that pack each dropout mask into bits and unpack it; yield the mask and the unpacked one."""
        for drawn in [node for node in self._forward if node.target in DRAWN_MASKS]:
            position = DRAWN_MASKS[drawn.target]
            outputs = {0: drawn} if position is None else {node.args[1]: node for node in drawn.users}
            mask = outputs.get(position or 0)
            if mask is None or bytes_of(mask) < cut.MIN_BYTES:
                continue
            value = mask.meta["val"]
            bits = self._insert(mask, bits_of, (mask,), {}, _bits_like(value))
            shape, _ = self._layout(mask)
            unpacked = self._insert(bits, mask_of, (bits, shape, value.dtype), {}, value)
            yield mask, unpacked

    def _replace_unread(self) -> None:
        """Let backward read an uninitialized tensor where it reads only the shape of an input, as frozen layers do.

        Where it reads only the signs of the output of a ReLU, let it read a tensor that is computed from their bits.
        """
        for node in self._backward:
            read: Any = node.args[1] if len(node.args) > 1 else None
            source: Any = base_of(read) if is_node(read) else None
            if source not in self._is_forward:
                continue
            value = read.meta["val"]
            read = source if are_alike(source, read) else read
            if read not in self._is_forward:
                continue
            if reads_only_shape(node.target, node.args):
                options = {"dtype": value.dtype, "device": value.device}
                node.update_arg(1, self._call(node, aten.empty_strided.default, self._layout(read), options, value))
            elif self._is_eager and reads_only_signs(node.target, node.args) and source.target is RELU:
                bits = self._insert(read, signs_of, (source,), {}, _bits_like(value))
                args = bits, *self._layout(read), value.dtype, value.device
                node.update_arg(1, self._insert(bits, rectified_of, args, {}, value))
        self._graph.eliminate_dead_code()  # views of what was replaced
        self._forward = [node for node in self._forward if node.users or not is_computed(node)]
        self._backward = [node for node in self._backward if node.users]
        self._is_forward = set(self._forward)

    def _layout(self, node: Node) -> tuple[list[Any], list[Any]]:
        """Return the shape and the strides of a tensor of forward; a symbolic size is a node that is inserted."""

        def argument(operation: Any, dim: int, size: Any) -> Any:
            return size if isinstance(size, int) else self._insert(node, operation, (node, dim), {}, size)

        value = node.meta["val"]
        shape = [argument(aten.sym_size.int, dim, size) for dim, size in enumerate(value.shape)]
        return shape, [argument(aten.sym_stride.int, dim, size) for dim, size in enumerate(value.stride())]

    def _insert(self, after: Node, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """Insert a node of forward."""
        with self._graph.inserting_after(after):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {**after.meta, "val": value}
        self._forward.insert(self._forward.index(after) + 1, node)
        self._is_forward.add(node)
        return node

    def _at(self, source: Node, user: Node, is_recipe: bool = True) -> Node:
        """Return a node with the value of ``source`` that backward can read, computed before its first reader.

        A recipe reads the value of forward, also of an input that is overwritten before backward. Other nodes read
        what is in the memory of an input then, as in plain training.
        """
        if is_recipe and source in self._foreign:
            if source not in self._copies:
                self._copies[source] = self._insert(source, own, (source,), {}, source.meta["val"])
            return self._copies[source]
        if source not in self._is_forward or not is_computed(source) or is_symbol(source):
            return source
        source = self._unpacked.get(source, source)
        if source.target is rectified_of and source.args[0] not in self._saved:
            source = source.args[0].args[0]  # the output of the ReLU itself takes no more memory
        if source in self._saved:
            return source
        is_recipe = is_recipe or base_of(source) not in self._foreign
        key = source, is_recipe
        if key not in self._clones:
            self._clones[key] = self._norm(source, user) or self._clone(source, user, is_recipe)
        return self._clones[key]

    def _clone(self, source: Node, user: Node, is_recipe: bool) -> Node:
        if not self._cut.is_cheap(source):
            return source
        args = map_arg(source.args, lambda each: self._at(each, user, is_recipe))
        kwargs = map_arg(source.kwargs, lambda each: self._at(each, user, is_recipe))
        rule = RULES.get(source.target) if self._is_eager else None
        if source in self._cut.prices:  # later readers unpack masks again, and not hold them until then
            self._clones = {key: clone for key, clone in self._clones.items() if key[0] not in self._of_masks}
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
        outputs = outputs_of(norm)
        is_fused = self._is_eager and norm_is_fusible(norm)
        other = None if shortcut is None else self._at(shortcut, user)
        if norm.target is CUDNN_BATCH_NORM:
            if not is_fused:
                return self._call(user, cudnn_norm.recompute, (at, weight, bias, momentum, eps), {}, value)
            order = order_of(x.meta["val"])
            return self._call(
                user, normalize, (at, weight, bias, outputs[1], outputs[2], order, other, is_rectified), {}, value
            )
        if self._is_eager and norm.target is BATCH_NORM and value.is_cuda and {1, 2} <= outputs.keys():
            args = at, weight, bias, outputs[1], outputs[2], eps
            return self._call(user, aten.batch_norm_elemt.default, args, {}, value)
        if not is_fused:
            again = self._call(
                user, BATCH_NORM_OF_BATCH, (at, weight, bias, True, momentum, eps), {}, norm.meta["val"][:3]
            )
            return self._call(user, operator.getitem, (again, 0), {}, value)
        line = self._call(user, line_of, (weight, bias, outputs[1], outputs[2]), {}, (outputs[1].meta["val"],) * 2)
        alpha, beta = (
            self._call(user, operator.getitem, (line, index), {}, outputs[1].meta["val"]) for index in range(2)
        )
        return self._call(user, apply_line, (at, alpha, beta, other, is_rectified), {}, value)

    def _match_norm(self, source: Node) -> tuple[Node | None, Node | None, bool]:
        """Return a batch norm whose output ``source`` is, or is after a sum with a shortcut or a ReLU or both."""
        norm = norm_of(source)
        if norm is not None or not self._is_eager:
            return norm, None, False
        node, shortcut, is_rectified = source, None, False
        if node.target is RELU and self._is_passed_through(node.args[0]):
            node, is_rectified = node.args[0], True
        if node.target is ADD and not node.kwargs:
            for first, second in (node.args[:2], node.args[1::-1]):
                is_alike = is_node(second) and are_alike(second, node)
                if is_alike and norm_of(first) is not None and self._is_passed_through(first):
                    node, shortcut = first, second
                    break
        norm = None if node is source else norm_of(node)
        return (norm, shortcut, is_rectified) if norm is not None and norm_is_fusible(norm) else (None, None, False)

    def _is_passed_through(self, node: Any) -> bool:
        """Return whether backward reads a node only as the input of others, so that it need not exist by itself."""
        return is_node(node) and node not in self._needed and node not in self._saved

    def _call(self, user: Node, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        with self._graph.inserting_before(user):
            return insert_in_backward(self._graph, target, args, kwargs, value)


def _is_epilogue(node: Node) -> bool:
    """Return whether a node writes into an input of forward, such as running statistics."""
    return node.target is aten.copy_.default and not node.meta.get("autograd_backward")


def _bits_like(value: Tensor) -> Tensor:
    """Return an example of `bits_of` a tensor."""
    return value.new_empty(-(-value.numel() // 8), dtype=torch.uint8)
