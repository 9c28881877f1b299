"""The rules of lean training applied to Inductor's joint graphs: what forward saves, and what backward recomputes.

AOTAutograd traces forward and backward of a network into one joint graph of functional operations. `partition` plans
what forward saves. Other forward nodes that backward reads are cloned into the backward part, in front of their
readers. Then torch splits the graph, and Inductor fuses the clones into the kernels of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from zoo.errors import ConfigError
from zoo.remat._budget import Budget
from zoo.remat._rules import reads_only_shape
from zoo.remat.inductor._cut import Cut
from zoo.remat.inductor._nodes import Node, are_alike, base_of, is_computed, is_node, is_symbol, is_tensor
from zoo.torch_internals import compiler
from zoo.torch_internals.compiler import (
    BACKWARD_TAG,
    default_partition,
    inductor_partitioner,
    is_forward_node,
    is_tangent_node,
    overwritten_inputs,
)

aten = torch.ops.aten


def inductor_options(budget: float | int | str | None = None) -> dict[str, Any]:
    """Return ``options`` for torch.compile that make Inductor's graphs save what `zoo.lean` would save.

    ``torch.compile(model, options=zoo.remat.inductor_options())`` fuses recomputation into backward's kernels.
    Results equal other compiled training up to rounding. Random numbers are drawn once. Without a GPU, the options turn
    off Inductor's layout optimization, which would hold a copy of the weights of convolutions until backward.

    Args:
    - `budget`: as for `zoo.lean`, except for a limit in bytes; a fraction applies to each graph.

    Raises ConfigError for an invalid budget or a limit in bytes.
    """
    limit = Budget.parse(budget)
    if limit.peak_bytes is not None:
        raise ConfigError(
            f"budget {budget!r} limits the peak of a training step, which a graph does not know",
            "zoo.remat.inductor_options",
            "pass a fraction such as 0.4",
        )
    sources = map(str, [*Path(__file__).parents[1].rglob("*.py"), *Path(compiler.__file__).parent.glob("*.py")])
    rule = inductor_partitioner(partial(partition, budget=limit), *sources, key=repr(budget))
    options: dict[str, Any] = {"custom_partitioner_fn": rule}
    return options if torch.cuda.is_available() else {**options, "layout_optimization": False}


def partition(
    joint: fx.GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, budget: Budget, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that forward saves few bytes for backward; return the forward and the backward graph.

    Args:
    - `joint`: changed in place.
    - `num_fwd_outputs`: number of the outputs that belong to forward; they come first.
    - `budget`: the limit on recomputing convolutions and matrix products.
    - `options`: the options of torch's default partitioner.
    """
    options.pop("compiler", None)  # Inductor names itself to its own partitioner
    graph = joint.graph
    graph.eliminate_dead_code()
    _Rewriting(graph, num_fwd_outputs, budget).run()
    graph.eliminate_dead_code()
    graph.lint()
    joint.recompile()
    return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)


class _Rewriting:
    """Replaces inputs of backward nodes by clones of forward nodes, where the plan does not save these."""

    def __init__(self, graph: Any, num_fwd_outputs: int, budget: Budget) -> None:
        self._graph = graph
        nodes = list(graph.nodes)
        # As in torch's default partitioner, forward ends with the last node that was traced in it.
        end = 1 + max(index for index, node in enumerate(nodes) if node.op == "placeholder" or is_forward_node(node))
        self._forward = [node for node in nodes[:end] if not is_tangent_node(node)]
        self._is_forward = set(self._forward)
        self._backward = [node for node in nodes[end:] if is_computed(node) and not _is_epilogue(node)]
        outputs = graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        returned = {node for node in outputs[num_fwd_outputs:] if is_node(node)} & self._is_forward
        self._replace_unread()
        reads = [source for node in self._backward for source in node.all_input_nodes if self._is_read(source)]
        written = {node.args[0] for node in nodes if node.target is aten.copy_.default} | overwritten_inputs(graph)
        self._cut = Cut(self._forward, reads, returned, written, budget)
        self._clones: dict[Node, Node] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        time = 0
        for node in self._backward:
            found: dict[Node, Node] = {}
            for source in node.all_input_nodes:
                before = self._clones.copy()
                found[source] = self._at(source, node)
                if self._is_read(source):
                    for clone in list(self._clones):
                        if self._cut.frees(clone, time, is_new=clone not in before):
                            del self._clones[clone]
                    time += 1
            node.args, node.kwargs = map_arg((node.args, node.kwargs), found.__getitem__)

    def _is_read(self, source: Node) -> bool:
        """Return whether an input of a backward node is a tensor of forward."""
        return source in self._is_forward and is_tensor(source)

    def _replace_unread(self) -> None:
        """Replace inputs of which backward reads only the shape, as in frozen layers, by uninitialized tensors."""
        for node in self._backward:
            read: Any = node.args[1] if len(node.args) > 1 else None
            source: Any = base_of(read) if is_node(read) else None
            if source not in self._is_forward or not reads_only_shape(node.target, node.args):
                continue
            value = read.meta["val"]
            read = source if are_alike(source, read) else read
            if read in self._is_forward:
                options = {"dtype": value.dtype, "device": value.device}
                node.update_arg(1, self._call(node, aten.empty_strided.default, self._layout(read), options, value))
        self._graph.eliminate_dead_code()  # removes unused views of replaced inputs
        self._forward = [node for node in self._forward if node.users or not is_computed(node)]
        self._backward = [node for node in self._backward if node.users]
        self._is_forward = set(self._forward)

    def _layout(self, node: Node) -> tuple[list[Any], list[Any]]:
        """Return the shape and the strides of a tensor of forward. Inserts a node for each symbolic size."""

        def argument(operation: Any, dim: int, size: Any) -> Any:
            return size if isinstance(size, int) else self._insert(node, operation, (node, dim), size)

        value = node.meta["val"]
        shape = [argument(aten.sym_size.int, dim, size) for dim, size in enumerate(value.shape)]
        return shape, [argument(aten.sym_stride.int, dim, size) for dim, size in enumerate(value.stride())]

    def _insert(self, after: Node, target: Any, args: Any, value: Any) -> Node:
        """Insert a node of forward; return it."""
        with self._graph.inserting_after(after):
            node = self._graph.call_function(target, args)
        node.meta = {**after.meta, "val": value}
        self._forward.insert(self._forward.index(after) + 1, node)
        self._is_forward.add(node)
        return node

    def _at(self, source: Node, user: Node) -> Node:
        """Return ``source`` if backward can read it; otherwise its clone, inserted before ``user`` if it is new."""
        is_available = source not in self._is_forward or not is_computed(source) or is_symbol(source)
        if is_available or source in self._cut.saved or not self._cut.is_repeatable(source):
            return source
        if source not in self._clones:
            args, kwargs = (map_arg(part, partial(self._at, user=user)) for part in (source.args, source.kwargs))
            self._clones[source] = self._call(user, source.target, args, kwargs, source.meta["val"])
        return self._clones[source]

    def _call(self, user: Node, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        """Insert an operation of backward with an example of its value; return its node."""
        with self._graph.inserting_before(user):
            node = self._graph.call_function(target, args, kwargs)
        node.meta = {**BACKWARD_TAG, "val": value}
        return node


def _is_epilogue(node: Node) -> bool:
    """Return whether a node writes into an input of forward, such as running statistics."""
    return node.target is aten.copy_.default and not node.meta.get("autograd_backward")
