"""Autocast in captured graphs: inputs are cast once for all uses, as in eager training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zoo.remat.nodes import Node, insert_in_backward, is_node
from zoo.remat.operations import ADD
from zoo.torch_internals import CAST, is_tangent_node


def cached_casts(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[bool]:
    """Return which inputs eager autocast casts once for all uses: leaves that require gradients."""
    names = {getattr(node.target, "__name__", "") for node in graph.graph.nodes}
    is_autocast = "_enter_autocast" in names or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return [is_autocast and isinstance(each, Tensor) and each.is_leaf and each.requires_grad for each in inputs]


def share_casts(graph: Any, num_fwd_outputs: int, cached_casts: Sequence[bool]) -> None:
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
                    total = insert_in_backward(graph, ADD, (total, term), {}, term.meta["val"])
                total = insert_in_backward(graph, CAST, (total,), {"dtype": node.meta["val"].dtype}, node.meta["val"])
                for term in terms:
                    if term.target is not CAST:
                        total = insert_in_backward(graph, ADD, (total, term), {}, node.meta["val"])
            graph.output_node().replace_input_with(gradient, total)


def _terms(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum, in the order in which they are added."""
    if node.target is ADD and not node.kwargs and len(node.users) == 1:
        for term in node.args:
            yield from _terms(term) if is_node(term) else ()
    else:
        yield node
